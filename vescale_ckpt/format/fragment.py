"""A fragment: what one rank tells the coordinator of a save, once its chunks are durable.

It stands alone: its chunks count packs in a table of its own, and parts of tiles carry their number of dims, so it can
be checked before anything is known of the other ranks. ``format.assemble`` makes one manifest's tables of them all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError
from vescale_ckpt.format.checks import check_partial_rows, check_stored, internal, partial_starts
from vescale_ckpt.format.chunk_columns import CHUNK_COLUMNS, check_columns, decode_columns, encode_columns
from vescale_ckpt.format.collector import paused_collector
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.json_text import check_json, decode_json, encode_json, take
from vescale_ckpt.format.kinds import FragmentKind
from vescale_ckpt.format.packs import check_packs, decode_packs, encode_packs, pack_sizes
from vescale_ckpt.format.records import FORMAT_VERSION, PackRecord
from vescale_ckpt.format.tensor_table import decode_path
from vescale_ckpt.format.tree_codec import MAX_RANK, decode_tree, encode_tree, tree_from_json, tree_to_json
from vescale_ckpt.geometry.box import Box
from vescale_storage.digest import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.document import Document
    from vescale_ckpt.state.tree import Node, Path
    from vescale_storage.backend import Buffer

MAGIC: Final = b"\x89VSFRG\r\n"
WHAT: Final = "fragment"
_MAX_PLAN_KEY_BYTES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class FragmentChunks:
    """Columns, one row a chunk that this rank wrote or found stored, in any order."""

    tensor: npt.NDArray[np.uint32]  # [num_chunks] index in the plan's tensors
    tile: npt.NDArray[np.uint32]  # [num_chunks]
    digest: npt.NDArray[np.uint8]  # [num_chunks, 32]
    pack: npt.NDArray[np.uint32]  # [num_chunks] index in the fragment's packs
    offset: npt.NDArray[np.uint64]  # [num_chunks]
    length: npt.NDArray[np.uint32]  # [num_chunks]
    codec: npt.NDArray[np.uint8]  # [num_chunks]
    partial_row: npt.NDArray[np.uint64]  # [num_partial] ascending
    partial_ndim: npt.NDArray[np.uint8]  # [num_partial]
    partial_box: npt.NDArray[np.uint64]  # flat: per partial row ndim offsets, then ndim sizes, of the global tensor
    share_row: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    # [num_shares] ascending, all in partial_row: stored chunks of which other ranks hold the rest
    share_box: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    # flat: per share ndim offsets, then ndim sizes, of what this rank holds of the chunk, in the global tensor

    def __post_init__(self) -> None:
        check_columns(self)

    @classmethod
    def of(
        cls,
        *,
        tensor: Sequence[int] = (),
        tile: Sequence[int] = (),
        digest: Sequence[bytes] = (),
        pack: Sequence[int] = (),
        offset: Sequence[int] = (),
        length: Sequence[int] = (),
        codec: Sequence[int] = (),
        partial: Sequence[tuple[int, Box]] = (),
    ) -> FragmentChunks:
        """Return the columns made of lists; ``partial`` names (row, box) of parts of tiles, by row."""
        return cls(
            tensor=np.array(tensor, np.uint32),
            tile=np.array(tile, np.uint32),
            digest=np.frombuffer(b"".join(digest), np.uint8).reshape(-1, DIGEST_BYTES)
            if digest
            else np.zeros((0, DIGEST_BYTES), np.uint8),
            pack=np.array(pack, np.uint32),
            offset=np.array(offset, np.uint64),
            length=np.array(length, np.uint32),
            codec=np.array(codec, np.uint8),
            partial_row=np.array([row for row, _ in partial], np.uint64),
            partial_ndim=np.array([box.ndim for _, box in partial], np.uint8),
            partial_box=_numbers(partial),
        )

    def with_shares(self, shares: Sequence[tuple[int, Box]]) -> FragmentChunks:
        """Return the columns with shares: (row, what of its chunk this rank holds), by row."""
        rows = np.array([row for row, _ in shares], np.uint64)
        return dataclasses.replace(self, share_row=rows, share_box=_numbers(shares))

    def shares(self) -> Iterator[tuple[int, Box, Box]]:
        """Yield (row, box of the stored chunk, what of it this rank holds) of each share."""
        places = np.searchsorted(self.partial_row, self.share_row)
        ndim = self.partial_ndim.astype(np.int64)
        whole, part = partial_starts(ndim), partial_starts(ndim[places])
        for number, (row, place) in enumerate(zip(self.share_row.tolist(), places.tolist(), strict=True)):
            box = _box(self.partial_box[whole[place] : whole[place + 1]])
            yield row, box, _box(self.share_box[part[number] : part[number + 1]])

    def kept(self, keep: npt.NDArray[np.bool_]) -> FragmentChunks:
        """Return the chunks for which ``keep`` (``bool[len(self)]``) is true, without shares."""
        parts = keep[self.partial_row]
        columns = {name: getattr(self, name)[keep] for name in ("tensor", *CHUNK_COLUMNS)}
        return FragmentChunks(
            **columns,
            partial_row=(np.cumsum(keep) - 1)[self.partial_row[parts]].astype(np.uint64),
            partial_ndim=self.partial_ndim[parts],
            partial_box=self.partial_box[np.repeat(parts, 2 * self.partial_ndim.astype(np.int64))],
        )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.tile)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FragmentChunks):
            return NotImplemented
        names = [column.name for column in dataclasses.fields(self)]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What one rank did in one save."""

    rank: int
    plan_key: bytes
    """Digest of the plan that the rank followed; at most 64 bytes."""
    tree: Node | None = None
    """The rank's state tree, per-rank values taken out; None where it is the coordinator's."""
    per_rank: tuple[tuple[Path, Node], ...] = ()
    """What ``state.merge.split_per_rank`` took out."""
    chunks: FragmentChunks = field(default_factory=FragmentChunks.of)
    packs: tuple[PackRecord, ...] = ()
    replicas: Mapping[int, bytes] = field(default_factory=dict)
    """Tensor index -> digest of this rank's copy, for tensors of which several ranks compare theirs."""
    counters: Mapping[str, int | float] = field(default_factory=dict)
    """What the rank counted, for the report of the save."""

    __hash__ = None  # type: ignore[assignment]


def encode_fragment(fragment: Fragment) -> bytes:
    """Return the bytes of a fragment.

    Raises:
        InvalidInputError: a value of its tree is of a kind that no manifest holds.
        InternalError: it contradicts itself, so that no reader would take it.
    """
    sections = [Section(FragmentKind.HEAD, encode_json(_head(fragment)))]
    if fragment.tree is not None:
        sections.append(Section(FragmentKind.TREE, encode_tree(fragment.tree)))
    per_rank = [[list(path), tree_to_json(node, path)] for path, node in fragment.per_rank]
    sections.append(Section(FragmentKind.PER_RANK, encode_json(per_rank)))
    chunks, replicas = fragment.chunks, fragment.replicas
    try:
        check_packs(fragment.packs, WHAT)
        _check_chunks(chunks, fragment.packs)
    except CorruptionError as error:
        raise internal(error) from error
    sections += encode_columns(chunks)
    if len(chunks.share_row):
        sections.append(Section(FragmentKind.SHARE_ROW, chunks.share_row))
        sections.append(Section(FragmentKind.SHARE_BOX, chunks.share_box))
    sections += encode_packs(fragment.packs, FragmentKind.PACK_NAME, FragmentKind.PACK_SIZE)
    digests = b"".join(replicas.values())
    return encode_document(
        MAGIC,
        FORMAT_VERSION,
        [
            *sections,
            Section(FragmentKind.CHUNK_TENSOR, chunks.tensor),
            Section(FragmentKind.PARTIAL_NDIM, chunks.partial_ndim),
            Section(FragmentKind.REPLICA_TENSOR, np.array(list(replicas), np.uint32)),
            Section(FragmentKind.REPLICA_DIGEST, digests),
        ],
    )


def decode_fragments(contents: Iterable[Buffer]) -> list[Fragment]:
    """Return the fragments of all ranks; those with equal trees share one object, which is decoded and merged once.

    Raises:
        FormatError: as ``decode_fragment``.
    """
    trees: dict[bytes, Node] = {}
    with paused_collector():
        return [_decode(data, trees) for data in contents]


def decode_fragment(data: Buffer) -> Fragment:
    """Return the fragment of some bytes; its columns are read-only views of them.

    Raises:
        UnsupportedVersionError: it needs a newer reader; names both versions.
        FormatError: it is no fragment.
        CorruptionError: it is one, and contradicts itself.
    """
    return _decode(data, {})


def _decode(data: Buffer, trees: dict[bytes, Node]) -> Fragment:
    """Return a fragment; ``trees`` are those decoded so far, by their bytes."""
    document = decode_document(data, magic=MAGIC, version=FORMAT_VERSION, what=WHAT, known=frozenset(FragmentKind))
    head = decode_json(document.section(FragmentKind.HEAD), f"{WHAT}'s head", floats=True)
    packs = decode_packs(document, FragmentKind.PACK_NAME, FragmentKind.PACK_SIZE)
    chunks = FragmentChunks(
        tensor=document.column(FragmentKind.CHUNK_TENSOR, np.uint32),
        partial_ndim=document.column(FragmentKind.PARTIAL_NDIM, np.uint8),
        **decode_columns(document),
        **_share_columns(document),
    )
    _check_chunks(chunks, packs)
    replicas = document.column(FragmentKind.REPLICA_TENSOR, np.uint32).tolist()
    digests = document.column(FragmentKind.REPLICA_DIGEST, np.uint8, DIGEST_BYTES)
    if len(replicas) != len(digests) or len(set(replicas)) != len(replicas):
        raise CorruptionError(f"cannot use the {WHAT}: {len(digests)} digests of {len(replicas)} replicas")
    fragment = Fragment(
        rank=take(head, "rank", int, WHAT),
        plan_key=_plan_key(take(head, "plan_key", str, WHAT)),
        tree=_tree(document.sections.get(FragmentKind.TREE), trees),
        per_rank=_per_rank(decode_json(document.section(FragmentKind.PER_RANK), WHAT, floats=False)),
        chunks=chunks,
        packs=packs,
        replicas={tensor: digest.tobytes() for tensor, digest in zip(replicas, digests, strict=True)},
        counters=take(head, "counters", dict, WHAT),
    )
    try:
        _head(fragment)
    except InvalidInputError as error:
        raise FormatError(f"cannot read the {WHAT}: {error.message}") from error
    return fragment


def _head(fragment: Fragment) -> dict[str, Any]:
    """Return the head as JSON, after a look at each field."""
    if type(fragment.rank) is not int or not 0 <= fragment.rank <= MAX_RANK:
        raise InvalidInputError(f"a fragment cannot have rank = {str(fragment.rank)[:80]!r}")
    if len(fragment.plan_key) > _MAX_PLAN_KEY_BYTES:
        raise InvalidInputError(f"a fragment cannot have a plan key of {len(fragment.plan_key)} bytes")
    if any(len(name) != DIGEST_BYTES for name in fragment.replicas.values()):
        raise InvalidInputError("a fragment's digests of replicas do not all have 32 bytes")
    counters = dict(fragment.counters)
    check_json(counters, "counters")
    if not all(type(value) in {int, float} for value in counters.values()):
        raise InvalidInputError("a fragment's counters are not all numbers")
    return {"rank": fragment.rank, "plan_key": fragment.plan_key.hex(), "counters": counters}


def _check_chunks(chunks: FragmentChunks, packs: Sequence[PackRecord]) -> None:
    """Refuse columns that contradict one another or the pack table."""
    num_partial, ndim = len(chunks.partial_row), chunks.partial_ndim.astype(np.int64)
    if len(chunks.tensor) != len(chunks) or len(ndim) != num_partial or 2 * int(ndim.sum()) != len(chunks.partial_box):
        raise CorruptionError(f"cannot use the {WHAT}: its columns of chunks or of parts have different lengths")
    check_partial_rows(chunks.partial_row, len(chunks), WHAT)
    _check_shares(chunks)
    check_stored(chunks.pack, chunks.offset, chunks.length, chunks.codec, pack_sizes=pack_sizes(packs), what=WHAT)


def _check_shares(chunks: FragmentChunks) -> None:
    """Refuse shares of rows that have no box of their own, and shares that do not lie in it."""
    known = np.isin(chunks.share_row, chunks.partial_row)
    places = np.searchsorted(chunks.partial_row, chunks.share_row[known])
    num_numbers = 2 * int(chunks.partial_ndim[places].astype(np.int64).sum())
    if (
        not known.all()
        or (np.diff(chunks.share_row.astype(np.int64)) <= 0).any()
        or num_numbers != len(chunks.share_box)
    ):
        raise CorruptionError(f"cannot use the {WHAT}: its columns of shares do not fit those of its parts")
    for row, box, part in chunks.shares():
        if part.volume == 0 or not box.contains(part):
            raise CorruptionError(f"cannot use the {WHAT}: the share {part} of chunk {row} does not lie in its {box}")


def _share_columns(document: Document) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of shares, which a fragment without any leaves out."""
    kinds = {"share_row": FragmentKind.SHARE_ROW, "share_box": FragmentKind.SHARE_BOX}
    return {name: document.column(kind, np.uint64) for name, kind in kinds.items() if kind in document.sections}


def _numbers(boxes: Sequence[tuple[int, Box]]) -> npt.NDArray[np.uint64]:
    """Return boxes one after another: offsets, then sizes."""
    return np.array([number for _, box in boxes for number in (*box.offset, *box.shape)], np.uint64)


def _box(numbers: npt.NDArray[np.uint64]) -> Box:
    """Return the box of its offsets, then sizes."""
    offset, shape = np.split(numbers, 2)
    return Box(tuple(offset.tolist()), tuple(shape.tolist()))


def _tree(section: memoryview | None, trees: dict[bytes, Node]) -> Node | None:
    if section is None:
        return None
    data = bytes(section)
    if data not in trees:
        trees[data] = decode_tree(data)
    return trees[data]


def _plan_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise FormatError(f"cannot read the {WHAT}: its plan key is no hex") from error
    return key


def _per_rank(doc: Any) -> tuple[tuple[Path, Node], ...]:
    """Return per-rank entries of their JSON form."""
    if doc.__class__ is not list or not all(entry.__class__ is list and len(entry) == 2 for entry in doc):
        raise FormatError(f"cannot read the {WHAT}: its per-rank entries are no list of pairs")
    entries = []
    for keys, node in doc:
        path = decode_path(keys, WHAT)
        entries.append((path, tree_from_json(node, path)))
    return tuple(entries)
