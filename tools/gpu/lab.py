# SPDX-License-Identifier: Apache-2.0
"""Where tools/gpu-check.sh measures: a GPU through PyTorch, or the emulator, which has no times but
runs the same steps, so that they are tested where there is no GPU."""
import ctypes
import statistics

import rig as rigs

WARM, REPLAYS = 5, 50


class Gpu:
    """PyTorch's current device. Our kernels run in its context and streams."""

    timed = True
    device = "cuda"

    def __init__(self, library):
        import torch
        self.torch, self.library = torch, library
        if not torch.cuda.is_available():
            raise rigs.RigError("PyTorch finds no GPU here")
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # so that a context is current
        self.rig = rigs.Rig(library)
        self.name = torch.cuda.get_device_name()
        self.dtype = torch.bfloat16
        self.code = rigs.BF16
        self.stream = None

    def classic(self):
        """The same with the kernels of classic dequantization at head_dim 128."""
        return Gpu(classic_library(self.library))

    def normal(self, *shape):
        return self.torch.randn(*shape, device="cuda", dtype=self.dtype)

    def empty(self, *shape, dtype=None):
        return self.torch.full(shape, float("nan"), device="cuda", dtype=dtype or self.dtype)

    def single(self):
        return self.torch.float32

    @staticmethod
    def at(tensor):
        return tensor.data_ptr()

    def now(self):
        """The stream that calls go to: another one while a graph is captured."""
        return self.torch.cuda.current_stream().cuda_stream

    def numbers(self, tensor):
        self.torch.cuda.synchronize()
        return tensor.double().cpu().numpy()

    def clear(self):
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def free_bytes(self):
        return self.torch.cuda.mem_get_info()[0]

    def graph_of(self, calls):
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what libraries set up at their first calls
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def time(self, calls, replays=REPLAYS):
        """Microseconds of one call, from replays of a graph of all: the median, measured twice."""
        torch = self.torch
        graph = self.graph_of(calls)
        medians = []
        for _ in range(2):
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)]
                     for _ in range(replays)]
            for _ in range(WARM):
                graph.replay()
            for start, end in marks:
                start.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            medians.append(statistics.median(a.elapsed_time(b) for a, b in marks))
        return [1e3 * m / len(calls) for m in medians]


class Emulator:
    """No times: what takes time is only run, and once."""

    timed = False
    torch = None

    def __init__(self, library):
        import numpy
        self.numpy, self.library = numpy, library
        self.rig = rigs.Rig(library)
        self.name = "emulator"
        self.code = rigs.F32
        self.random = numpy.random.default_rng(1)

    def classic(self):
        return Emulator(classic_library(self.library))

    def normal(self, *shape):
        return self.put(self.random.standard_normal(shape).astype(self.numpy.float32))

    def put(self, array):
        at = self.rig.take(array.nbytes)
        self.rig.copy_in(at, array)
        return at, array.shape

    def empty(self, *shape, dtype=None):
        return self.put(self.numpy.full(shape, self.numpy.nan, dtype or self.numpy.float32))

    def single(self):
        return self.numpy.float32

    @staticmethod
    def at(tensor):
        return tensor[0]

    @staticmethod
    def now():
        return 0

    def numbers(self, tensor):
        at, shape = tensor
        array = self.numpy.empty(shape, self.numpy.float32)
        return self.rig.copy_out(array, at).astype(self.numpy.float64)

    def clear(self):
        pass

    @staticmethod
    def free_bytes():
        return 1 << 30

    @staticmethod
    def time(calls, replays=1):
        del replays
        for call in calls:
            call()
        return [float("nan")] * 2


class TorchEmulator(Emulator):
    """With PyTorch's tensors over the emulator's memory, for what computes with both."""

    device = "cpu"

    def __init__(self, library):
        import torch
        super().__init__(library)
        self.torch, self.dtype = torch, torch.float32

    def classic(self):
        return TorchEmulator(classic_library(self.library))

    def put(self, array):
        at = self.rig.take(array.nbytes)
        self.rig.copy_in(at, array)
        memory = (ctypes.c_char * array.nbytes).from_address(at)
        return self.torch.frombuffer(memory, dtype=self.dtype).view(array.shape)

    @staticmethod
    def at(tensor):
        return tensor.data_ptr()

    def numbers(self, tensor):
        return tensor.double().numpy()


def classic_library(library):
    path = str(library)
    return path.replace("kvq_gpu_rig", "kvq_gpu_rig_classic")


def open_lab(library):
    """The library tells by its name which it is."""
    if "emu" in str(library):
        try:
            return TorchEmulator(library)
        except ImportError:
            return Emulator(library)
    ctypes.CDLL("libcuda.so.1")  # an error here says more than PyTorch does
    return Gpu(library)
