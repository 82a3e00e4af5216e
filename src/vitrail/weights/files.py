"""Open files of tensors: safetensors, PyTorch's pickles and NumPy's npz, recognised by their first bytes.

Nothing here runs code from a file, and every damaged file ends in a WeightsError. No file stays mapped, so a file that
is overwritten or cut short later cannot crash a running program.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import re
import struct
import threading
import tokenize
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.system.commands import quote_word
from vitrail.system.files import open_regular_file

DAMAGE = (
    *(OSError, EOFError, MemoryError, RuntimeError, ValueError, TypeError, KeyError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
"""Exceptions that the reading libraries raise for a damaged file."""
MEANINGLESS_RATIO = 100
"""A compressed array so many times larger than its file is an attack, not weights."""
LARGE, CHUNK = 1 << 20, 1 << 24
"""Bytes: tensors from LARGE on get memory of their own from the system; CHUNK bytes are unpacked at a time."""


class TensorInfo(NamedTuple):
    """Shape and type of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFile(ABC):
    """Named tensors in a file; subclasses read one kind of file each."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    wrapper_key: str | None = None
    """The key under which a training program saved the tensors, such as "model"; None if they are at the top level."""

    def read(self, name: str) -> Tensor:
        """Return one tensor in memory of its own. Read each name once; several threads may read at the same time."""
        with convert_read_errors(self.path):
            return self._read(name)

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """Do the work of `read`; any exception of DAMAGE is allowed."""


IMAGES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM")
"""First bytes of image files."""


@contextlib.contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Turn exceptions of the reading libraries into a WeightsError that names the file."""
    try:
        yield
    except WeightsError:
        raise
    except FileNotFoundError:
        raise WeightsError(f"there is no file {path}") from None
    except DAMAGE as error:
        raise WeightsError(f"{path} cannot be read: {_first_line(error)}") from error


def check_link(path: Path) -> None:
    """Raise a WeightsError if a file of a model folder is a link that leads elsewhere.

    It may lead inside the folder, or inside the cache of the Hugging Face hub, whose snapshots are folders of links to
    `blobs` beside them.
    """
    try:
        folder, target = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError):
        raise WeightsError(f"{path} is a link that leads nowhere") from None
    if target.is_relative_to(folder):
        return
    snapshots = folder.parent
    if snapshots.name == "snapshots" and target.is_relative_to(snapshots.parent / "blobs"):
        return
    from huggingface_hub import constants

    if not target.is_relative_to(Path(constants.HF_HUB_CACHE).resolve()):
        raise WeightsError(f"{path} is a link that leads out of its folder, and is not followed: copy the file there")


@contextlib.contextmanager
def open_tensors(path: Path, part: str = "") -> Iterator[TensorFile]:
    """Open a file of tensors; its first bytes decide the kind, not its name.

    A PyTorch file may hold several dictionaries of tensors: `part` then begins with the key of one of them.
    """
    with contextlib.ExitStack() as stack:
        with convert_read_errors(path):
            opened = _open_by_first_bytes(path, stack.enter_context(open_regular_file(path)), part)
        yield opened


def _open_by_first_bytes(path: Path, file: BinaryIO, part: str) -> TensorFile:
    start = file.read(9)
    if not start:
        raise WeightsError(f"{path} is empty")
    if start.startswith(b"PK"):
        return _open_zip(path, file, part)
    if start.startswith(b"\x80"):
        return TorchFile(path, part)  # the format before 2020: a bare pickle
    if start[8:9] == b"{":
        return SafetensorsFile(path, file)
    if start.startswith(IMAGES):
        word = quote_word(str(path))
        raise WeightsError(f"{path} is an image, not a model: try vitrail predict {word}, or inspect --images {word}")
    raise WeightsError(f"{path} is not a file of weights: expected safetensors, a PyTorch .pth or a NumPy .npz")


class SafetensorsFile(TensorFile):
    """A safetensors file. The library checks the header; the bytes are read by offset."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        try:
            with safe_open(path, framework="pt") as header:
                names = header.offset_keys()
                views = {name: header.get_slice(name) for name in names}
                self.tensors = {
                    name: TensorInfo(tuple(view.get_shape()), _SAFETENSORS_DTYPES[view.get_dtype()])
                    for name, view in views.items()
                }
        except SafetensorError as error:
            raise WeightsError(f"{path} is damaged: {_first_line(error)}") from None
        except KeyError as error:
            raise WeightsError(f"{path} holds tensors of type {error.args[0]}, which are not weights") from None
        # The library has checked that tensors follow each other without gaps after the header.
        file.seek(0)
        offset = 8 + int.from_bytes(file.read(8), "little")
        self.offsets = {}
        for name in names:
            self.offsets[name] = offset
            offset += _count_bytes(self.tensors[name])

    def _read(self, name: str) -> Tensor:
        info, offset = self.tensors[name], self.offsets[name]
        buffer = _allocate(_count_bytes(info))
        _fill_buffer(buffer, lambda view, done: _read_at(self.file, view, offset + done), self.path)
        return buffer.view(info.dtype).reshape(info.shape)


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _open_zip(path: Path, file: BinaryIO, part: str) -> TensorFile:
    """Open a zip: an npz if it holds arrays, a PyTorch file if it holds a pickle."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise WeightsError(f"{path} is damaged: {_first_line(error)}") from None
    members = archive.infolist()
    if members and all(member.filename.endswith(".npy") for member in members):
        return NpzFile(path, file, archive)
    if any(member.filename.endswith("/data.pkl") for member in members):
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise WeightsError(f"{path} is a compressed archive, which PyTorch never writes")
        return TorchFile(path, part)
    raise WeightsError(f"{path} is a zip of something else: expected a PyTorch .pth or a NumPy .npz")


class NpzFile(TensorFile):
    """A zip of NumPy arrays without pickles, as Google's checkpoints are."""

    def __init__(self, path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> None:
        self.path, self.file = path, file
        self.tensors = {}
        self.members: dict[str, _Member] = {}
        size = path.stat().st_size
        for zipped in archive.infolist():
            if zipped.file_size > MEANINGLESS_RATIO * size:
                raise WeightsError(f"{path}: {zipped.filename} would unpack to {zipped.file_size:,} bytes")
            with archive.open(zipped) as stream:
                shape, fortran, dtype = _read_npy_header(path, zipped, stream)
                header = stream.tell()
            name = zipped.filename.removesuffix(".npy")
            self.tensors[name] = TensorInfo(shape, _find_torch_dtype(path, name, dtype))
            if header + _count_bytes(self.tensors[name]) != zipped.file_size:
                raise WeightsError(f"{path}: {zipped.filename} says {shape} and holds something else")
            self.members[name] = _Member(zipped, header, fortran, dtype.isnative)

    def _read(self, name: str) -> Tensor:
        member, (shape, dtype) = self.members[name], self.tensors[name]
        buffer = _allocate(_count_bytes(self.tensors[name]))
        if member.zipped.compress_type == zipfile.ZIP_STORED:
            self._copy(member, buffer)
        else:
            self._unpack(member, buffer)
        if not member.native_order:
            buffer.copy_(buffer.view(-1, dtype.itemsize).flip(1).flatten())
        tensor = buffer.view(dtype)  # bfloat16, which NumPy does not know, is stored as two bytes without a name
        if member.fortran:
            return tensor.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
        return tensor.reshape(shape)

    def _copy(self, member: _Member, buffer: Tensor) -> None:
        """Read an uncompressed array; the zip header before it ends in the lengths of a name and of extra fields."""
        local = bytearray(30)
        _read_at(self.file, memoryview(local), member.zipped.header_offset)
        start = member.zipped.header_offset + 30 + sum(struct.unpack("<HH", local[26:]))
        header = bytearray(member.header)
        _read_at(self.file, memoryview(header), start)
        _fill_buffer(buffer, lambda view, done: _read_at(self.file, view, start + member.header + done), self.path)
        if zlib.crc32(memoryview(buffer.numpy().data), zlib.crc32(header)) != member.zipped.CRC:
            raise WeightsError(f"{self.path} is damaged: the checksum of {member.zipped.filename} is wrong")

    def _unpack(self, member: _Member, buffer: Tensor) -> None:
        """Read a compressed array through a handle of its own, because two threads cannot share one."""
        with zipfile.ZipFile(self.path) as archive, archive.open(member.zipped) as stream:
            stream.read(member.header)
            into: Any = stream
            _fill_buffer(buffer, lambda view, _: into.readinto(view[:CHUNK]), self.path)
            if stream.read(1):  # at the end of the data the archive also compares its checksum
                raise WeightsError(f"{self.path}: {member.zipped.filename} is longer than it says")


class _Member(NamedTuple):
    """Where an array lies in a zip, and how its values are stored."""

    zipped: zipfile.ZipInfo
    header: int
    """Number of bytes before the values."""
    fortran: bool
    native_order: bool


def _read_npy_header(path: Path, member: zipfile.ZipInfo, stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, fortran, dtype = read(stream)
    except (*DAMAGE, SyntaxError, tokenize.TokenError) as error:  # NumPy reads headers as Python literals
        raise WeightsError(f"{path}: {member.filename} is not an array: {_first_line(error)}") from None
    if dtype.hasobject:
        raise WeightsError(f"{path}: {member.filename} holds pickled objects, which could run code and are never read")
    return shape, fortran, dtype


def _find_torch_dtype(path: Path, name: str, dtype: np.dtype[Any]) -> torch.dtype:
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
        return torch.bfloat16
    known = {"f8": torch.float64, "f4": torch.float32, "f2": torch.float16, "i8": torch.int64, "i4": torch.int32}
    torch_dtype = known.get(f"{dtype.kind}{dtype.itemsize}")
    if torch_dtype is None:
        raise WeightsError(f"{path}: {name} is of type {dtype}, which is not weights")
    return torch_dtype


class TorchFile(TensorFile):
    """A PyTorch file, read whole by PyTorch's safe reader, which builds tensors and runs no other code."""

    def __init__(self, path: Path, part: str = "") -> None:
        self.path = path
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise WeightsError(
                f"{path} is refused: reading it would run {_find_refused_name(error)}, which could be any code. "
                "If you trust it, save its weights alone with safetensors.torch.save_file, and load that"
            ) from None
        except Exception as error:  # a damaged file fails in PyTorch in many ways
            raise WeightsError(f"{path} is damaged: {_first_line(error)}") from None
        if not isinstance(content, Mapping):
            raise WeightsError(f"{path} holds a {type(content).__name__}, not named tensors")
        self.wrapper_key = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if isinstance(content.get(part.partition(".")[0]), Mapping):
            self.wrapper_key = None  # the caller has chosen among the dictionaries
            content = _join_dictionaries(content)
        self.contents = dict(_select_tensors(path, content if self.wrapper_key is None else content[self.wrapper_key]))
        if not self.contents and self.wrapper_key is None:
            self.contents = dict(_select_tensors(path, _join_dictionaries(content)))
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.contents.items()}
        uses = Counter(tensor.untyped_storage().data_ptr() for tensor in self.contents.values())
        self.shared = {address for address, count in uses.items() if count > 1}

    def _read(self, name: str) -> Tensor:
        """Remove the tensor from this file, so that its memory is freed early; copy it if its memory is shared."""
        tensor = self.contents.pop(name)
        storage = tensor.untyped_storage()
        alone = storage.data_ptr() not in self.shared and storage.nbytes() == tensor.numel() * tensor.element_size()
        return tensor if alone else tensor.clone()


WRAPPERS = ("model", "state_dict", "model_state_dict", "teacher", "module")
"""Keys under which training programs put the weights."""


def _join_dictionaries(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the contents of all dictionaries in a file as one, under names that begin with their keys."""
    inner = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    return {f"{key}.{name}": tensor for key, value in inner.items() for name, tensor in value.items()}


def _select_tensors(path: Path, content: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            continue  # epoch numbers, arguments and the like
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise WeightsError(f"{path}: {name} is not a plain tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise WeightsError(f"{path}: {name} claims more values than the file holds")
        yield str(name), tensor.detach()


def _allocate(length: int) -> Tensor:
    """Return empty bytes that go back to the system as soon as they are freed.

    With the usual allocator, freed parts of joined tensors leave holes, and a large model needs a quarter more memory.
    """
    if length < LARGE:
        return torch.empty(length, dtype=torch.uint8, device="cpu")
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.frombuffer(mmap.mmap(-1, length, **private), dtype=torch.uint8)


def _read_at(file: BinaryIO, view: memoryview, offset: int) -> int:
    """Read from `offset` into memory and return the number of bytes; threads do not disturb each other."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], offset)
    with _ONE_AT_A_TIME:  # Windows
        file.seek(offset)
        into: Any = file
        return int(into.readinto(view))


_ONE_AT_A_TIME = threading.Lock()


def _fill_buffer(buffer: Tensor, read: Callable[[memoryview, int], int], path: object) -> None:
    """Call `read(rest of the buffer, bytes already read)` until the buffer is full."""
    view = memoryview(buffer.numpy().data)
    done = 0
    while done < len(view):
        count = read(view[done:], done)
        if not count:
            raise WeightsError(f"{path} ends too early")
        done += count


def _count_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _first_line(error: BaseException) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def _find_refused_name(error: BaseException) -> str:
    """Return the function that the file wanted to call; PyTorch names it inside a long message."""
    match = re.search(r"GLOBAL ([\w.]+)|(?:instruction|operand)[^\n]*", str(error))
    return match.group(1) or f"an unknown {match.group()}" if match else "something other than tensors"
