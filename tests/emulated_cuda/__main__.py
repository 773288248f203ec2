"""Run command lines on the machine's GPU, or on an emulated CUDA device where torch sees none.

    python tests/emulated_cuda "grpo.py --num-steps 2" ["rloo.py --num-steps 2" ...]
    torchrun --nproc-per-node 2 tests/emulated_cuda "grpo_multigpu.py --num-steps 2"

The emulated device runs every line of a script's GPU path on the CPU's kernels, including autocast, the 16-bit copy and
CUDA graphs. It doesn't show a GPU's speed or test a GPU's kernels. It needs a torch that was built without CUDA.

Like a GPU, it refuses an operation on tensors of two devices (device.cpp), and an operation that makes the host
wait while a graph is recorded. It also refuses a replay that uses freed memory; a GPU would read this memory without
an error. Like on a GPU, recording computes nothing, and a replay reads and writes the recorded memory. Each process has
a device, and processes communicate through the host.
"""

import ctypes
import os
import runpy
import shlex
import subprocess
import sys
import traceback
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# The host waits for the result of these operators, or for the result's size.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_consecutive",
    "bincount",
}
# Numbers of graphs, and libraries of operators.
counts, libraries = dict(recorded=0, replayed=0), []


def build() -> Path:
    """Compile device.cpp once for each version of device.cpp and torch."""
    source, package = Path(__file__).with_name("device.cpp"), Path(torch.__file__).parent
    name = f"emulated_cuda-{torch.__version__}-{zlib.crc32(source.read_bytes()):x}.so"
    library = source.parent / "__pycache__" / name
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            source,
            "-o",
            library.with_suffix(f".{os.getpid()}"),
        ]
        command += [
            f"-I{package / folder}" for folder in ("include", "include/torch/csrc/api/include")
        ]
        command += [f"-L{package / 'lib'}", f"-Wl,-rpath,{package / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        library.with_suffix(f".{os.getpid()}").rename(library)
    return library


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Borrowed:
    """A tensor that the graph uses but doesn't own. Like with an address, the program may free its memory."""

    def __init__(self, tensor: torch.Tensor):
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self.empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def tensor(self) -> torch.Tensor:
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if memory is None:
            raise RuntimeError("emulated CUDA: a replay uses memory that has been freed")
        return self.empty.new_empty(0).set_(memory, *self.place)


class CUDAGraph:
    def __init__(self):
        # (operator, arguments, nesting of the arguments, outputs)
        self.operations = []

    def replay(self) -> None:
        counts["replayed"] += 1
        for function, inputs, nesting, outputs in self.operations:
            args, kwargs = tree_unflatten(
                [x.tensor() if isinstance(x, Borrowed) else x for x in inputs], nesting
            )
            results = tree_leaves(function(*args, **kwargs))
            for output, result in zip(outputs, results, strict=True):
                if isinstance(output, torch.Tensor):
                    output.copy_(result)


class Recording(TorchDispatchMode):
    """Replaces torch.cuda.graph."""

    active = False

    def __init__(self, graph: CUDAGraph):
        super().__init__()
        self.graph, self.owned, self.before = graph, set(), []

    def __enter__(self):
        Recording.active = True
        return super().__enter__()

    def address(self, value):
        # A CPU tensor is a number here. A launch copies it.
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            return value.clone()
        return (
            Borrowed(value)
            if isinstance(value, torch.Tensor) and storage(value) not in self.owned
            else value
        )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        inputs, nesting = tree_flatten((args, kwargs))
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        name = schema.name.removeprefix("aten::")
        devices = {x.device.type for x in tensors if x.ndim > 0}
        devices |= {x.type for x in inputs if isinstance(x, torch.device)}
        masked = name == "index" and any(x.dtype == torch.bool for x in tensors[1:])
        # Of the products of experts, only those in bf16 don't wait, and only on an H100, H200 or B200.
        experts = name == "_grouped_mm" and tensors[0].dtype != torch.bfloat16
        # Two devices mean a copy from or to the host, or indices on the host.
        if name in WAITS or masked or experts or len(devices) > 1:
            raise RuntimeError(
                f"emulated CUDA: {name} makes the host wait, not permitted while a graph is recorded"
            )
        for argument, value in zip(schema.arguments, args, strict=False):
            if (
                argument.alias_info
                and argument.alias_info.is_write
                and storage(value) not in self.owned
            ):
                self.before.append((value, value.clone()))
        results = function(*args, **kwargs)
        outputs, known = tree_leaves(results), {storage(x) for x in tensors}
        new = {storage(x) for x in outputs if isinstance(x, torch.Tensor)} - known
        # The other operators only return views of the same memory.
        if new or schema.is_mutable:
            # A replay doesn't have to copy the results of in-place operators.
            kept = outputs if new else [None] * len(outputs)
            self.owned |= new
            self.graph.operations.append(
                (function, [self.address(x) for x in inputs], nesting, kept)
            )
        return results

    def __exit__(self, *exception):
        super().__exit__(*exception)
        Recording.active = False
        counts["recorded"] += 1
        # Recording must not change any memory.
        for value, before in reversed(self.before):
            value.copy_(before)
        self.before.clear()


class Stream:
    """A stream or an event. All earlier operations are already complete."""

    device = torch.device("cuda", 0)

    def __init__(self, *args, **kwargs):
        pass

    def nothing(self, *args, **kwargs) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = __exit__ = nothing

    def itself(self, *args, **kwargs):
        return self

    record_event = __enter__ = itself


def install_communication() -> None:
    """Let processes with one emulated GPU each exchange tensors through gloo on the host."""
    library, groups = torch.library.Library("c10d", "IMPL"), {}

    def on_host(value):
        if isinstance(value, torch.Tensor):
            return value.cpu()
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            world = dist.group.WORLD
            # The emulator supports only the group of all processes.
            if world not in groups:
                groups[world] = dist.new_group(backend="cpu:gloo").boxed()
            return groups[world]
        return value

    def through_host(operator):
        def run(*args):
            on_hosts = tree_map(on_host, args)
            result = operator(*on_hosts)
            work = result[1] if isinstance(result, tuple) else result
            dist.distributed_c10d.Work.unbox(work).wait()
            for value, received in zip(tree_leaves(args), tree_leaves(on_hosts), strict=True):
                if isinstance(value, torch.Tensor):
                    value.copy_(received)
            return (args[0], work) if isinstance(result, tuple) else work

        return run

    # torch warns about replaced operators.
    warnings.filterwarnings("ignore", "Warning only once for all operators")
    for name in (
        "allreduce_",
        "allgather_",
        "_allgather_base_",
        "_reduce_scatter_base_",
        "broadcast_",
        "scatter_",
    ):
        library.impl(
            name, through_host(getattr(torch.ops.c10d, name).default), "CUDA", allow_override=True
        )
    # torch removes the operators when nothing refers to the library.
    libraries.append(library)
    dist.Backend.default_device_backend_map["cuda"] = "gloo"


def install_convolution() -> None:
    """Let the host compute convolutions. For CUDA torch chooses kernels for them that the CPU doesn't have."""
    library = torch.library.Library("aten", "IMPL")

    def through_host(operator):
        def run(*args):
            on_host = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, args)
            to_device = lambda x: x.cuda() if isinstance(x, torch.Tensor) else x  # noqa: E731
            return tree_map(to_device, operator(*on_host))

        return run

    for name in ("convolution", "convolution_backward"):
        library.impl(name, through_host(getattr(torch.ops.aten, name).default), "CUDA")
    libraries.append(library)


def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage. torch's function works only on the devices that torch was built for."""
    whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
    return whole.clone().untyped_storage()


def install(library: Path) -> None:
    """Make torch.cuda use the emulated device."""
    counted = ctypes.CDLL(str(library))
    counted.emulated_cuda_peak.restype = ctypes.c_int64
    torch.UntypedStorage.clone = clone
    # torch's resize_ has the same limit. Here a freed storage stays allocated.
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda self, size: (
        self if self.device.type == "cuda" else resize(self, size)
    )
    torch.Tensor.record_stream = lambda self, stream: None
    # On a GPU histc also counts integers.
    histc = torch.histc
    torch.histc = lambda x, *args, **kwargs: histc(x.float(), *args, **kwargs).to(x.dtype)

    def device_count():  # as in device.cpp
        return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 1

    def capability(*_):
        if device_count() == 0:
            raise RuntimeError("No CUDA GPUs are available")
        return 9, 0

    functions = dict(
        is_available=lambda: device_count() > 0,
        is_bf16_supported=lambda *_: True,
        device_count=device_count,
    )
    functions |= dict(
        current_device=lambda: 0, _exchange_device=lambda _: 0, _maybe_exchange_device=lambda _: 0
    )
    functions |= dict(
        synchronize=lambda *_: None, manual_seed_all=lambda _: None, empty_cache=lambda: None
    )
    functions |= dict(
        get_rng_state=lambda *_: torch.get_rng_state(), get_device_name=lambda *_: "emulated CUDA"
    )
    functions |= dict(
        set_rng_state=lambda state, *_: torch.set_rng_state(state), set_device=lambda _: None
    )
    functions |= dict(is_current_stream_capturing=lambda: Recording.active)
    functions |= dict(get_device_capability=capability)
    functions |= dict(current_stream=Stream, stream=Stream, Stream=Stream, Event=Stream)
    functions |= dict(max_memory_allocated=lambda *_: counted.emulated_cuda_peak())
    functions |= dict(memory_stats=lambda *_: {}, memory_reserved=lambda *_: 0)
    functions |= dict(max_memory_reserved=lambda *_: 0)
    functions |= dict(reset_peak_memory_stats=lambda *_: counted.emulated_cuda_reset_peak())
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.cuda._initialized, torch.cuda.CUDAGraph, torch.cuda.graph = True, CUDAGraph, Recording
    install_communication()
    install_convolution()


def count_graphs() -> None:
    """Count the graphs of a real GPU."""

    class Counted(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **kwargs):
            counts["recorded"] += 1
            super().capture_begin(*args, **kwargs)

        def replay(self):
            counts["replayed"] += 1
            super().replay()

    torch.cuda.CUDAGraph = Counted


def emulate() -> None:
    if torch.version.cuda is not None:
        raise SystemExit(
            "error: this torch was built with CUDA, and sees no GPU; the emulated device needs one "
            "that was built without"
        )
    library = build()
    # torch looks for devices once, during its import. So the process must start again with the library.
    if os.environ.get("LD_PRELOAD") != str(library):
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)}
        )
    del os.environ["LD_PRELOAD"]
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # each process has a device of its own
    install(library)


def main() -> None:
    if torch.cuda.device_count() > 0:  # unlike is_available, this still allows a program to fork
        count_graphs()
    else:
        emulate()
    worst = 0
    for line in sys.argv[1:]:
        sys.argv = shlex.split(line)
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        counts.update(recorded=0, replayed=0)
        if torch.cuda.is_initialized():  # else this initializes it, and the program can't fork
            torch.cuda.reset_peak_memory_stats()
        print(f"---- {line}", flush=True)
        status = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except Exception:
            traceback.print_exc(file=sys.stdout)
            status = 1
        print(
            f"---- status {status}, {counts['recorded']} graphs recorded, {counts['replayed']} replayed",
            flush=True,
        )
        worst = worst or status
    raise SystemExit(worst)


if __name__ == "__main__":
    main()
