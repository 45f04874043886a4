import asyncio
import base64
import io
import random
import zlib

import pytest

from vescale_storage.backends.s3_body import PayloadBody, crc32


def views_of(*sizes):
    content = random.Random(0).randbytes(sum(sizes))
    views, offset = [], 0
    for size in sizes:
        views.append(memoryview(content)[offset : offset + size])
        offset += size
    return content, views


async def iterate(body):
    return [bytes(view) async for view in body]


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, 7), (2**20 + 1, 3, 600_000)])
def test_iterations_yield_everything_each_time(sizes):
    content, views = views_of(*sizes)
    body = PayloadBody(views)
    assert len(body) == len(content)
    for _ in range(2):
        pieces = asyncio.run(iterate(body))
        assert b"".join(pieces) == content
        assert all(0 < len(piece) <= 512 * 2**10 for piece in pieces)


def test_pieces_are_not_copied():
    async def check():
        buffer = bytearray(100)
        iterator = aiter(PayloadBody([memoryview(buffer)]))
        buffer[3] = 77
        return bytes(await anext(iterator))[3]

    assert asyncio.run(check()) == 77


def test_read_is_that_of_a_file():
    content, views = views_of(3, 0, 10, 1, 6)
    body, file = PayloadBody(views), io.BytesIO(content)
    chance = random.Random(1)
    for _ in range(300):
        match chance.randrange(4):
            case 0:
                num_bytes = chance.choice([-1, 0, 1, 2, 5, 30])
                assert body.read(num_bytes) == file.read(num_bytes)
            case 1:
                offset = chance.randrange(21)
                assert body.seek(offset) == file.seek(offset)
            case 2:
                assert body.seek(0, io.SEEK_END) == file.seek(0, io.SEEK_END)
            case 3:
                assert body.tell() == file.tell()
    body.seek(0)
    assert body.read() == content


def test_reading_does_not_disturb_an_iteration():
    content, views = views_of(8, 8)
    body = PayloadBody(views)
    body.read(5)
    assert b"".join(asyncio.run(iterate(body))) == content


def test_crc32_is_that_of_the_whole():
    content, views = views_of(10, 0, 1000, 1)
    assert crc32(views) == base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
    assert crc32([]) == "AAAAAA=="
