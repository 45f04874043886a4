"""One ``torch.save`` archive: its pickle as plain data, its tensors as regions of the file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.foreign.pickles import MAX_PICKLE_BYTES, load_pickle
from vescale_ckpt.interop.foreign.regions import Region, check_region
from vescale_ckpt.interop.torchsave.allowed import BASE, DTYPES, storage_of
from vescale_ckpt.interop.torchsave.directory import read_directory, read_member

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.torchsave.allowed import Make, StoredStorage, StoredTensor
    from vescale_ckpt.interop.torchsave.directory import Member

PICKLE: Final = "data.pkl"
_SMALL: Final = 1 << 16


class Archive:
    """An archive that is a file, or a range of one; ``value`` is what was saved, tensors as ``StoredTensor``.

    Raises:
        FormatError: it is no such archive, or its pickle asks for what is no data.
        CorruptionError: members and storages do not fit.
        ObjectNotFoundError, StorageError: it cannot be read.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        *,
        start: int = 0,
        length: int | None = None,
        makers: Mapping[str, Make] = BASE,
    ) -> None:
        self.what = f"{name!r} of {files.url}"
        self._files, self._name = files, name
        members = read_directory(files, name, start, length)
        pickles = [key for key in members if key.count("/") == 1 and key.endswith(f"/{PICKLE}")]
        if len(pickles) != 1:
            raise FormatError(
                f"cannot read {self.what}: it is a zip archive with {len(pickles)} pickles ({PICKLE}), not one; "
                "torch.save writes one",
                path=name,
            )
        self._prefix = pickles[0].removesuffix(PICKLE)
        self._members = members
        self._big_endian = self._order() == b"big"
        text = read_member(files, name, members[pickles[0]], MAX_PICKLE_BYTES)
        self.pickle_bytes = len(text)
        self.value: Any = load_pickle(text, self.what, makers, constants=DTYPES, persistent=storage_of)

    def _order(self) -> bytes:
        member = self._members.get(f"{self._prefix}byteorder")
        order = b"little" if member is None else read_member(self._files, self._name, member, _SMALL)
        if order not in {b"little", b"big"}:
            raise FormatError(f"cannot read {self.what}: its byte order is {order[:20]!r}")
        return order

    def storage(self, storage: StoredStorage) -> Member:
        """Return the member of a storage.

        Raises:
            CorruptionError: there is none, or it has another size than the pickle says.
        """
        member = self._members.get(f"{self._prefix}data/{storage.key}")
        width = 1 if storage.dtype is None else storage.dtype.itemsize
        if member is None or member.num_bytes != storage.numel * width:
            found = "is not there" if member is None else f"has {member.num_bytes} bytes"
            raise CorruptionError(
                f"cannot read {self.what}: its storage {storage.key[:80]!r} of {storage.numel * width} bytes {found}",
                path=self._name,
            )
        return member

    def region(self, tensor: StoredTensor) -> Region:
        """Return where a tensor lies.

        Raises:
            CorruptionError: its storage is not there, or it leaves it.
        """
        if not math.prod(tensor.shape):
            return Region(self._name, 0, tensor.dtype, tensor.shape, tensor.strides)
        member = self.storage(tensor.storage)
        offset = member.offset + tensor.offset * tensor.dtype.itemsize
        region = Region(self._name, offset, tensor.dtype, tensor.shape, tensor.strides, self._big_endian)
        return check_region(region, member.offset, member.offset + member.num_bytes, self.what)
