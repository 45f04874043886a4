"""Storage that loses answers, throttles, stalls, cuts, forbids and dies under a save: the right outcome, and soon.

A real server stands behind a proxy that does the harm; both S3 clients go through it. What is checked is the whole way:
a save and a load, as users call them. Every test is bounded in time by itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vescale_ckpt as vc
from tests.storage.s3_proxy import Proxy, cut_answer, error_answer, hang_up, stall_answer
from vescale_ckpt.errors import AccessDeniedError, StorageError, StorageTimeoutError, VeScaleError
from vescale_storage.wrappers.retry import RetryPolicy
from vescale_tools.seaweed import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import web

pytestmark = pytest.mark.s3

RUN = "run"
QUICK = RetryPolicy(max_attempts=8, first_delay_seconds=0.01, throttled_delay_seconds=0.02, max_delay_seconds=0.1)
IMPATIENT = RetryPolicy(
    max_attempts=4,
    first_delay_seconds=0.01,
    max_delay_seconds=0.02,
    deadline_seconds=1.0,
    min_bytes_per_second=64.0 * 2**20,
)
BOUND_SECONDS = 30.0
"""No fault here may hold a save or a load longer; the machine may be busy, most take a second."""


NAMES = ("a", "b", "c", "d")
SHAPE = (700, 1000)


def state(step: int) -> dict[str, Any]:
    """Return a state of at least two packs, none of which another step has."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.rand(SHAPE, generator=generator) for name in NAMES} | {"step": step}


def same(found: dict[str, Any], step: int) -> bool:
    wanted = state(step)
    return all(torch.equal(found[name], wanted[name]) for name in NAMES) and found["step"] == step


def kind_of(request: web.Request) -> str:
    """Return ``PUT packs`` for a put of a pack, and so on."""
    _, _, _, prefix, *_ = [*request.path.split("/", 4), "", ""]
    return f"{request.method} {prefix}"


@dataclass
class Place:
    """A store behind a proxy, and the same without it."""

    proxy: Proxy
    url: str
    options: dict[str, Any]
    direct: dict[str, Any]
    hits: list[str] = field(default_factory=list)

    def open(self, retry: RetryPolicy = QUICK, **more: Any) -> vc.Store:
        return vc.open_store(self.url, storage_options=self.options, retry=retry, **more)

    def harm(self, applies: Callable[[str, int], bool], tamper: Any) -> None:
        """Do harm to the requests that ``applies(kind, number among those of its kind)`` picks."""
        seen: dict[str, int] = {}
        self.hits.clear()

        async def handle(request: web.Request, forward: Any) -> Any:
            kind = kind_of(request)
            seen[kind] = number = seen.get(kind, 0) + 1
            if applies(kind, number):
                self.hits.append(kind)
                return await tamper(request, forward)
            return await forward(request)

        self.proxy.tamper = handle

    def heal(self) -> None:
        self.proxy.tamper = None

    def check(self, steps: list[int], *, version: int = 1) -> None:
        """Look past the proxy: these snapshots and no others are there, whole, committed once."""
        with vc.open_store(self.url, storage_options=self.direct) as store:
            assert [(info.step, info.version) for info in store.snapshots(RUN)] == [(step, version) for step in steps]
            for step in steps:
                assert same(store[f"{RUN}@{step}"].state_dict(), step)  # every byte of it verified


def place_before(server: SeaweedServer, client: str) -> Place:
    proxy = Proxy(server.endpoint_url)
    direct = server.storage_options
    return Place(proxy, f"s3://tests/{uuid.uuid4().hex}", direct | {"client": client}, direct)


BOTH_CLIENTS = pytest.mark.parametrize("place", ["s3fs", "obstore"], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, s3_server: SeaweedServer) -> Iterator[Place]:
    made = place_before(s3_server, getattr(request, "param", "s3fs"))
    with made.proxy.serving_in_thread():
        made.options["endpoint_url"] = made.proxy.url
        with made.open() as store:
            save(store, 1)
        yield made


def save(store: vc.Store, step: int) -> vc.SaveReport:
    options = vc.SaveOptions(pack_bytes=1 << 20, deadline_seconds=60)
    with vc.Checkpointer(store, RUN, options=options) as checkpointer:
        return checkpointer.save(step, state(step)).result()


def load(store: vc.Store, step: int) -> None:
    target = {name: torch.zeros(SHAPE) for name in NAMES} | {"step": -1}
    with vc.Checkpointer(store, RUN) as checkpointer:
        checkpointer.load(target, step)
    assert same(target, step)


class Within:
    """A block that must end in time."""

    def __init__(self, seconds: float = BOUND_SECONDS) -> None:
        self.bound = seconds

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        took = time.monotonic() - self.began
        assert took < self.bound, f"took {took:.1f} s"


async def lose_answer(request: web.Request, forward: Any) -> Any:
    await forward(request)
    return hang_up(request)


async def throttle(request: web.Request, _: Any) -> Any:
    await request.read()
    return error_answer(503, "SlowDown")


async def forbid(request: web.Request, _: Any) -> Any:
    await request.read()
    return error_answer(403, "AccessDenied")


async def swallow(request: web.Request, _: Any) -> Any:
    """Take the request and never answer."""
    await asyncio.sleep(60)
    return hang_up(request)


# ---- lost answers


@BOTH_CLIENTS
@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_answer_of_the_ref_put_is_one_commit(place, times):
    """The put has happened each time: what was lost is that it has."""
    place.harm(lambda kind, number: kind == "PUT refs" and number <= times, lose_answer)
    with Within(), place.open() as store:
        assert save(store, 2).version == 1
    assert len(place.hits) == times
    place.heal()
    place.check([1, 2])


@BOTH_CLIENTS
def test_lost_answers_of_every_first_put_are_one_save(place):
    """Packs, manifest and ref: whatever is put, is found to be there already."""
    place.harm(lambda kind, number: kind.startswith("PUT") and number % 2 == 1, lose_answer)
    with Within(), place.open() as store:
        save(store, 2)
    assert {"PUT packs", "PUT manifests", "PUT refs"} <= set(place.hits)
    place.heal()
    place.check([1, 2])


def test_an_answer_that_stays_lost_leaves_the_truth_to_the_store(place):
    """From the put of the ref on, the client hears nothing of refs: the save fails, and says what is open."""
    lost = threading.Event()

    def applies(kind: str, _: int) -> bool:
        if kind == "PUT refs":
            lost.set()
        return lost.is_set() and kind.endswith("refs")

    place.harm(applies, lose_answer)
    with Within(), place.open() as store, pytest.raises(StorageError) as caught:
        save(store, 2)
    told(caught.value, "committing", "refs/")
    assert "it may have been written all the same" in str(caught.value)
    place.heal()
    place.check([1, 2])
    with place.open() as store:
        assert save(store, 2).version == 2, "a save again is a version again, not a conflict"


# ---- throttling, stalls, short answers


@BOTH_CLIENTS
def test_503_on_every_third_request(place):
    count = iter(range(1, 10_000))
    place.harm(lambda *_: next(count) % 3 == 0, throttle)
    with Within(60), place.open() as store:
        save(store, 2)
        load(store, 2)
        assert store.counts.retries == len(place.hits) > 5
    place.heal()
    place.check([1, 2])


def test_a_storm_of_503_ends_in_an_error_that_can_be_tried_again(place):
    place.harm(lambda kind, _: kind == "PUT packs", throttle)
    with Within(), place.open() as store:
        with pytest.raises(StorageError) as caught:
            save(store, 2)
        assert caught.value.retryable
        assert "8 attempts" in str(caught.value)
        told(caught.value, "writing", "packs/")
        place.heal()
        save(store, 2)
    place.check([1, 2])


@BOTH_CLIENTS
@pytest.mark.parametrize("kind", ["GET packs", "GET manifests"])
def test_a_body_that_stalls_is_given_up_and_asked_for_again(place, kind):
    patience = IMPATIENT
    if kind == "GET manifests":  # a whole get knows no size before its answer: it gets the time of 256 MiB
        patience = RetryPolicy(max_attempts=4, first_delay_seconds=0.01, deadline_seconds=1, min_bytes_per_second=2**30)
    place.harm(lambda found, number: found == kind and number == 1, stall_answer)
    with Within(), place.open(patience) as store:
        load(store, 1)
    assert place.hits == [kind]


def test_a_body_that_always_stalls_is_an_error_in_time(place):
    place.harm(lambda kind, _: kind == "GET packs", stall_answer)
    with Within(), place.open(IMPATIENT) as store, pytest.raises(StorageTimeoutError) as caught:
        load(store, 1)
    told(caught.value, "loading run@1", "packs/")


@BOTH_CLIENTS
def test_a_put_that_is_never_answered_is_given_up_and_sent_again(place):
    place.harm(lambda kind, number: kind == "PUT packs" and number == 1, swallow)
    with Within(), place.open(IMPATIENT) as store:
        save(store, 2)
    assert place.hits == ["PUT packs"]
    place.heal()
    place.check([1, 2])


def test_short_answers_are_asked_for_again(place):
    place.harm(lambda kind, number: kind.startswith("GET") and number % 2 == 1, cut_answer)
    with Within(), place.open() as store:
        load(store, 1)
        assert store.counts.retries >= len(set(place.hits))
    assert {"GET packs", "GET manifests"} <= set(place.hits)


def test_answers_that_are_always_short_are_an_error_that_names_the_object(place):
    place.harm(lambda kind, _: kind == "GET packs", cut_answer)
    with Within(), place.open() as store, pytest.raises(StorageError) as caught:
        load(store, 1)
    told(caught.value, "loading run@1", "packs/")


# ---- loss of permission


@pytest.mark.parametrize(
    ("kind", "phase"), [("PUT packs", "writing"), ("PUT manifests", "committing"), ("PUT refs", "committing")]
)
def test_permission_lost_in_mid_save(place, kind, phase):
    """Everything from this request on is forbidden, as by a token that expires."""
    expired = threading.Event()

    def applies(found: str, number: int) -> bool:
        if found == kind and number == (2 if kind == "PUT packs" else 1):
            expired.set()
        return expired.is_set()

    place.harm(applies, forbid)
    with Within(), place.open() as store:
        with pytest.raises(AccessDeniedError) as caught:
            save(store, 2)
        told(caught.value, phase, kind.partition(" ")[2])
        assert not caught.value.retryable
        assert len(place.hits) <= 4, "nobody tries again what cannot help"
        place.heal()
        save(store, 2)
    place.check([1, 2])


def told(error: VeScaleError, phase: str, key: str) -> None:
    """Check that an error names phase and object, in words and for programs."""
    assert error.context["phase"] == phase
    assert error.context["key"].startswith(key)
    assert phase.replace("loading", "cannot load") in str(error)
    assert error.context["key"] in str(error)


# ---- a server that dies


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A server of this module alone, which may be killed."""
    with SeaweedServer(tmp_path_factory.mktemp("mortal")) as server:
        server.create_bucket("tests")
        yield server


def test_a_server_restarted_in_mid_save(mortal):
    """It dies as the second pack arrives and comes back some seconds later: the save goes on as if nothing were."""
    place = place_before(mortal, "obstore")
    patient = RetryPolicy(max_attempts=60, first_delay_seconds=0.2, max_delay_seconds=1.0, deadline_seconds=30)
    restarts: list[threading.Thread] = []

    async def die(request: web.Request, _: Any) -> Any:
        await request.read()
        mortal.kill()
        restarts.append(threading.Thread(target=mortal.start))
        restarts[0].start()
        return hang_up(request)

    with place.proxy.serving_in_thread():
        place.options["endpoint_url"] = place.proxy.url
        with place.open(patient) as store:
            save(store, 1)
            place.harm(lambda kind, number: kind == "PUT packs" and number == 2, die)
            with Within(90):
                save(store, 2)
            restarts[0].join(60)
            assert store.counts.retries > 0
            load(store, 2)
    place.check([1, 2])


def test_a_server_that_stays_away_is_an_error_in_time_and_nothing_is_lost(mortal):
    place = place_before(mortal, "s3fs")

    async def die(request: web.Request, _: Any) -> Any:
        await request.read()
        mortal.kill()
        return hang_up(request)

    with place.proxy.serving_in_thread():
        place.options["endpoint_url"] = place.proxy.url
        with place.open() as store:
            save(store, 1)
            place.harm(lambda kind, number: kind == "PUT packs" and number == 2, die)
            with Within(), pytest.raises(StorageError) as caught:
                save(store, 2)
            told(caught.value, "writing", "packs/")
            assert caught.value.retryable
            place.heal()
            mortal.restart()
            place.check([1])
            save(store, 2)
    place.check([1, 2])
