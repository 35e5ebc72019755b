"""ringway's native core (csrc/)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ringway.work import Work

Returned = TypeVar("Returned")

class Recorder:
    def __init__(self, capacity: int, path: str = "") -> None: ...
    @property
    def total(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def intern(self, text: str) -> int: ...
    def recent(self, count: int) -> list[tuple[Any, ...]]: ...
    def under_way(self) -> list[tuple[int, tuple[Any, ...]]]: ...
    def find(self, token: int) -> tuple[Any, ...] | None: ...
    def choose(self, enabled: bool, all: bool, by_caller: bool, ops: Sequence[int], labels: Sequence[str]) -> None: ...
    @property
    def logging(self) -> bool: ...
    def log(self, op: int, label: str, size: int, bytes: int, ns: int, always: bool = False) -> None: ...
    def logged(self) -> list[tuple[Any, ...]]: ...
    def arrivals(self) -> list[Any]: ...
    def reset_log(self) -> None: ...
    @property
    def keeps_times(self) -> bool: ...
    def start_trace(self, limit: int) -> None: ...
    def stop_trace(self) -> tuple[list[tuple[Any, ...]], int]: ...

class CallBoard:
    def __init__(self, fd: int, rank: int, ranks: Sequence[int], token: str) -> None: ...

class CallsDiffer(Exception):
    """Ranks of a group called different things; `GroupRecord.difference` says how."""

class GroupRecord:
    def __init__(self, recorder: Recorder, group: str, size: int = 1, ranks: Sequence[int] = ()) -> None: ...
    def begin(self, op: int, bytes: int, dtype: int, reduce: int, peer: int, label: int) -> int: ...
    def begin_call(self, call: Any, label: int) -> int:
        """Numbers and records a `ringway.call.Call`, and sets its `sequence` and `site`. Returns the record's token.
        If a call of this thread is starting, it returns 0, and nothing has happened."""
    def end(self, token: int, ok: bool) -> None: ...
    def end_on_device(self, token: int, ok: bool, times: tuple[int, int, int, bool], /) -> None:
        """`times` are the start and the end on the device, in the host's clock, the number of the stream, and whether
        that is not the program's own. All 0 if the device was not asked."""
    def started(self, ended: int, /) -> None:
        """The call that this thread has begun has started. Until then `is_starting` is true on this thread. `ended` is
        its token if it has ended too, else 0."""
    @property
    def is_starting(self) -> bool: ...
    @staticmethod
    def exchange_starting(calls: list[list[int]], /) -> list[list[int]]:
        """Replaces the calls that are starting on this thread, and returns what they were."""
    def take_back(self) -> bool | None:
        """Gives back the number of the call that is starting on this thread, so that the next call gets it, and ends
        its record if that has not ended. None if there is none, or if some of it may have been sent; False if a later
        call has a number already."""
    def compare(self, board: CallBoard) -> None: ...
    @property
    def difference(self) -> tuple[Any, ...] | None: ...
    def announce_abort(self, first: int) -> None:
        """Tells the ranks of this host that this one is about to abort the group. Collectives before `first` are known
        to have ended well."""
    @property
    def aborted_from(self) -> int | None:
        """The first collective that the abort of a rank of this host may have spoilt."""
    @property
    def keeps_times(self) -> bool: ...
    @property
    def collectives(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def completed(self) -> int: ...

class FastPath:
    """Runs calls on plain tensors. Backends subclass it and define `run`."""

    def __init__(
        self,
        record: GroupRecord,
        rank: int,
        size: int,
        device: int,
        moved: int,
        summed: int,
        ops: int,
        async_ops: int = 0,
    ) -> None: ...
    def begin(self, op: int, outputs: Any, inputs: Any, peer: int, reduce: int = 0) -> int:
        """Numbers, records and compares a call that the path takes, and returns its token; else 0, and no trace. Once
        the call has started, `GroupRecord.started` must be called. The path checks the dtype for sums only."""
    def run(
        self, op: int, outputs: Any, inputs: Any, peer: int, async_op: bool, tag: int, reduce: int, /
    ) -> Work | bool:
        """The Work of an asynchronous call, True if a synchronous one is done. False: nothing has happened."""
    def serve(self, op: int, ranges: Sequence[tuple[int, int]]) -> None: ...
    def hold(self, change: int) -> None: ...
    def has(self, op: int) -> bool: ...
    def has_async(self, op: int) -> bool: ...
    @property
    def takes_options(self) -> bool:
        """Whether it is a `StreamFastPath`, which takes a bridge's calls with torch's options."""

class PathTable:
    """The fast paths of one group, op by op."""

    def __init__(self) -> None: ...
    def set(
        self, sync: tuple[tuple[Callable[..., Any], ...], ...], asynchronous: tuple[tuple[Callable[..., Any], ...], ...]
    ) -> None:
        """By the op's code: the `run` of each path to try, in order."""
    def clear(self) -> None: ...
    def has(self, op: int) -> bool:
        """Whether a path takes synchronous calls of the op."""
    def run(
        self,
        op: int,
        outputs: Any,
        inputs: Any,
        peer: int = -1,
        async_op: bool = False,
        tag: int = 0,
        reduce: int = 0,
        /,
    ) -> Work | bool:
        """What the first path says that takes the call, else False."""

class WorldFastPath:
    """The fast paths of the default group and of ringway's other ones. `c10d` is torch's module that knows the default
    group; `bridge` is the class of the others, which have their paths in `paths`; `failure` turns the error of a path,
    and its group, None for the default one, into the error to raise."""

    def __init__(
        self, c10d: Any, bridge: type[Any], failure: Callable[[BaseException, Any], BaseException]
    ) -> None: ...
    def serve(self, group: Any, table: PathTable | None) -> None:
        """The default group is this one from now on, with the paths of this table. None for no group."""
    def run(
        self,
        op: int,
        outputs: Any,
        inputs: Any,
        peer: int = -1,
        async_op: bool = False,
        tag: int = 0,
        reduce: int = 0,
        /,
    ) -> Work | bool:
        """What the table of torch's default group says, else False."""
    def run_on(
        self,
        group: Any,
        op: int,
        outputs: Any,
        inputs: Any,
        peer: int = -1,
        async_op: bool = False,
        tag: int = 0,
        reduce: int = 0,
        /,
    ) -> Work | bool:
        """Like `run`, for this group, or for the default one if it is None. `peer` is the group's rank."""

class StreamWatch:
    """Loads the CUDA driver, or raises RuntimeError."""

    def __init__(self, library: str) -> None: ...

LateCall = tuple[int, int, tuple[int, int, int, bool]]

class StreamCalls:
    """The calls of one group on CUDA streams.

    Quick calls end in the record. `report` gets the others, which may have failed: (token, note, times) of the calls
    that ended late, with their times on the device; the note of a call that has waited for long or None; whether that
    one is overdue; whether calls that no stream has waited for are open for long; and the name of CUDA's error if the
    device cannot be asked.
    """

    def __init__(
        self,
        watch: StreamWatch,
        record: GroupRecord,
        report: Callable[[list[LateCall], int | None, bool, bool, str], None],
    ) -> None: ...
    limit: float
    """Seconds until a call is overdue; 0 for never."""
    def follow(self, token: int, note: int, device: int, stream: int, /) -> bool:
        """Follows a call just issued on a stream. False if the stream captures a graph."""
    @property
    def pending(self) -> int: ...
    def settle(self, seconds: float) -> None:
        """Waits, no longer than that, until the device has passed the calls or the group has failed."""
    def fail(self) -> None:
        """Pending calls end as failed."""
    def close(self) -> None: ...

class StreamWork:
    """An asynchronous call of a `StreamFastPath`."""

    path: Any
    kind: int
    """The number that `_prepare` gave to calls like this."""
    sequence: int
    token: int
    torchs: Any
    """torch's work."""
    outputs: Any
    is_message: bool
    followed: bool
    """Whether the native side reports its end, even if nobody waits."""
    @property
    def seconds(self) -> float:
        """Since it began."""
    def wait(self) -> bool:
        """Orders the current stream behind the call. False if the group has failed: then nothing has happened."""

class StreamFastPath(FastPath):
    """A fast path whose calls torch starts on CUDA streams. See csrc/python/stream_fast_path.h."""

    variant: int
    captures: bool
    """Whether a graph has captured a call."""
    def __init__(
        self,
        record: GroupRecord,
        rank: int,
        size: int,
        device: int,
        moved: int,
        summed: int,
        averaged: int,
        ops: int,
        calls: StreamCalls,
        open: dict[int, Any],
        work: type,
        streams: tuple[Callable[[int], int], Callable[[int], tuple[int, int, int]], Callable[[int, int, int], None]],
        reductions: dict[int, int],
    ) -> None: ...
    def note_open(self) -> None:
        """`open` was changed from Python."""

class BridgeMethod:
    """A method of a bridge whose calls a fast path takes. See csrc/python/bridge_method.h."""

    def __init__(
        self,
        op: int,
        path: FastPath,
        otherwise: Callable[..., Any],
        failure: Callable[[BaseException], BaseException],
    ) -> None: ...
    def __call__(self, *arguments: Any, **named: Any) -> Any: ...

class Responder:
    def __init__(self, recorder: Recorder, address: str, token: str, facts: str) -> None: ...
    @property
    def port(self) -> int: ...
    def wait(self) -> bool: ...
    def answer(self, stacks: str) -> None: ...
    def use_signal(self, number: int, fd: int) -> None: ...
    def farewell(self, why: str) -> None: ...
    def tell_of(self, recorder: Recorder, facts: str) -> None: ...
    def dump_at(self, number: int, path: str) -> None: ...
    def close(self) -> None: ...

def dumps_stacks() -> bool: ...
def handle_terminate() -> None: ...
def begin_exit() -> None: ...
def leave_threads_behind(threads: Sequence[int]) -> None: ...
def stacks_of_a_copy(signal: int = 0, fd: int = -1) -> str: ...
def create_call_board(size: int, seats: int, token: str) -> int: ...
def agreement(op: int) -> tuple[str, ...]: ...
def signature(op: int, amount: int, dtype: int, reduce: int, root: int) -> int: ...
def read_record_file(path: str) -> dict[str, Any]: ...
def set_quiet(quiet: bool) -> None: ...
def is_quiet() -> bool: ...
def set_profiled(profiled: bool) -> None: ...
def is_profiled() -> bool: ...
def set_machinery(inside: list[str], outside: list[str]) -> None: ...
def pass_on(function: Callable[..., Returned], /, *arguments: Any) -> Returned:
    """Calls a function that may send something, and notes that it does. If the function is C++ code, no signal handler
    runs between the two."""

def set_tensor_types(types: tuple[type, ...], exchange: Any) -> None: ...
def monotonic_ns() -> int: ...
def keyed_hash(key: bytes, data: Any) -> bytes: ...

HASH_KEY_BYTES: int

SHM_MAX_RANKS: int
CPU: int
CUDA: int

class ShmTask:
    def withdraw(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...
    def done(self) -> bool: ...
    def outcome(self) -> int: ...
    def fault(self) -> Mapping[str, Any] | None: ...
    def seen(self) -> bytes: ...
    def source(self) -> int: ...
    def message(self) -> tuple[bool, int, int, int]:
        """Of a message: whether it is a send, the peer, the tag, and its number."""
    def reference(self) -> bytes | None:
        """Of a message that was received: where its bytes are, if it was sent by reference."""
    def owned(self) -> bytes | None:
        """Of a message that was received: its bytes, if the receive had no room for them."""
    def when_done(self, callback: Callable[[], None]) -> None: ...

class ShmPeer:
    def __init__(self, pid: int, pidfd: int) -> None: ...
    @property
    def pid(self) -> int: ...
    @property
    def pidfd(self) -> int: ...

class ShmGroup:
    def __init__(
        self,
        fd: int,
        rank: int,
        peers: Sequence[ShmPeer],
        cpus: int,
        timeout: float,
        raise_outcome: Callable[[int, Mapping[str, Any] | None], None],
    ) -> None: ...
    def collective(self, call: Any, timeout: float) -> ShmTask | None: ...
    def show(self, call: Any, timeout: float, count: int, shown: bytes, manner: int) -> ShmTask | bytes: ...
    def differ(self, call: Any, count: int, source: int, target: int, sent: int, expected: int) -> NoReturn: ...
    def message(self, call: Any, timeout: float, reference: bytes | None = None, room: Any = None) -> ShmTask: ...
    def interrupted(self) -> None: ...
    def fail(self) -> None: ...
    def set_timeout(self, timeout: float) -> None: ...
    def fault(self) -> Mapping[str, Any] | None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

class ShmFastPath(FastPath):
    """Also starts asynchronous messages. See csrc/python/shm_fast_path.h."""

    def __init__(
        self,
        group: ShmGroup,
        record: GroupRecord,
        profiler: dict[str, Any],
        work: type,
        sent: Callable[[], Any],
        failed: Callable[[int], object],
    ) -> None: ...

SHM_DEVICE_RANKS: int
SHM_DIRECT: int
SHM_EVERY_RANK: int

class LaunchOrder:
    def __init__(self) -> None: ...

class ShmDevice:
    def __init__(
        self, group: ShmGroup, library: str, device: int, record: GroupRecord | None, order: LaunchOrder
    ) -> None: ...
    @property
    def has_mps(self) -> bool: ...
    @property
    def uuid(self) -> str: ...
    @property
    def device_index(self) -> int: ...
    @property
    def open_mappings(self) -> int: ...
    @staticmethod
    def offer_bytes() -> int: ...
    @staticmethod
    def offered(offer: bytes, place: int) -> int: ...
    def offer(self, spans: Sequence[tuple[int, int]], keep: bool) -> bytes | int: ...
    def accept(self, offers: bytes, wanted: Sequence[tuple[int, int]], keep: bool) -> list[tuple[int, int]]: ...
    def follow(self, stream: int) -> None: ...
    def enter(self) -> int: ...
    def wait_for_earlier(self, place: int, seconds: float) -> bool: ...
    def leave(self, place: int) -> None: ...
    def arrive(self, stream: int, worker: int) -> None: ...
    def copy(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def depart(
        self, stream: int, worker: int, call: Any, count: int, timeout: float, copies: Sequence[tuple[int, int, int]]
    ) -> None: ...
    def send(
        self, group: ShmGroup, call: Any, timeout: float, stream: int, memory: tuple[int, int], receiver: int
    ) -> ShmTask | None:
        """Copies a message to memory that its receiver can map, and sends it by reference. None without a free block:
        then nothing was sent."""
    def fetch(
        self,
        stream: int,
        sender: int,
        reference: bytes,
        message: tuple[int, int],
        call: Any,
        count: int,
        timeout: float,
    ) -> None: ...
    def allocate(self, bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def drain(self, seconds: float) -> bool: ...
    def close(self) -> None: ...

class ShmDeviceFastPath(FastPath):
    def __init__(
        self,
        group: ShmGroup,
        record: GroupRecord,
        kind: int,
        profiler: dict[str, Any],
        stream_of: Callable[[int], int],
        kernel_of: Callable[[int, int, bool, int, int, bool, bool], tuple[int, int, int, int] | None],
    ) -> None: ...
    def attach(
        self, link: ShmDevice | None, direct_from: Sequence[int], reduces: bool, takes_turns: bool, one_gpu: bool
    ) -> None: ...

def memory_left(root: str = "") -> tuple[int, str]: ...
def cpu_quota(root: str = "") -> tuple[int, float] | None: ...
def shm_set_read_once_from(bytes: int) -> None:
    """See csrc/shm/peer_memory.h."""

def shm_bytes_read_once() -> int:
    """See csrc/shm/peer_memory.h."""

def shm_create_segment(size: int) -> int: ...
def shm_can_reduce(dtype: int, reduce: int) -> bool: ...
def shm_isa() -> str: ...
def pack_instructions() -> str: ...
def pack_measure(
    format: tuple[int, int, int], values: tuple[int, int], residual: tuple[int, int], numel: int, threads: int, /
) -> float: ...
def pack_encode(
    format: tuple[int, int, int],
    values: tuple[int, int],
    residual: tuple[int, int],
    window: tuple[int, int, int, int],
    frames: tuple[int, int, int],
    scale: float,
    threads: int,
    /,
) -> None: ...
def pack_measure_mean(
    format: tuple[int, int, int], frames: tuple[int, int, int], residual: tuple[int, int], count: int, threads: int, /
) -> float: ...
def pack_encode_mean(
    format: tuple[int, int, int],
    frames: tuple[int, int, int],
    residual: tuple[int, int],
    count: int,
    frame: int,
    scale: float,
    threads: int,
    /,
) -> None: ...
def pack_decode(
    format: tuple[int, int, int],
    frames: tuple[int, int, int],
    window: tuple[int, int, int, int],
    values: tuple[int, int],
    threads: int,
    /,
) -> None: ...
def pack_decode_mean(
    format: tuple[int, int, int], frames: tuple[int, int, int], count: int, values: tuple[int, int], threads: int, /
) -> None: ...
