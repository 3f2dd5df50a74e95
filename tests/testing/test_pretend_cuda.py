"""The pretended CUDA: what a GPU refuses, what makes the host wait, and what a step launches."""

from __future__ import annotations

import contextlib
import threading
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from shim.testing import megatron_on_cpu, pretend_cuda  # noqa: E402
from shim.testing.pretend_cuda import CaptureError, DeviceFaultError, values_of  # noqa: E402


@pytest.fixture
def device():
    with pretend_cuda.cuda_pretended():
        yield torch.device("cuda")


def counts_of(function):
    with pretend_cuda.counted() as counts:
        function()
    return counts


def row(device, size=6):
    return torch.arange(float(size), device=device)


def test_a_tensor_says_that_it_is_on_the_device_and_has_its_values(device):
    tensor = torch.arange(6.0, device=0).view(2, 3)
    assert torch.device(0) == torch.device("cuda", 0)  # which a torch without a GPU refuses
    assert (tensor.device, tensor.is_cuda, tensor.get_device()) == (torch.device("cuda", 0), True, 0)
    assert tensor.type() == "torch.cuda.FloatTensor" and tensor.cuda() is tensor and tensor.to(device) is tensor
    assert (tensor @ tensor.t()).tolist() == [[5, 14], [14, 50]]
    assert torch.equal(values_of(tensor), torch.arange(6.0).view(2, 3))


def test_without_it_nothing_is_left():
    before = {name: vars(torch.cuda)[name] for name in ("is_available", "Stream", "current_device", "graph")}
    engine, to = torch.autograd._engine_run_backward, torch.nn.Module.to
    with pretend_cuda.cuda_pretended():
        assert torch.cuda.is_available() and torch.cuda.current_device() == 0
    assert {name: vars(torch.cuda)[name] for name in before} == before
    assert torch.autograd._engine_run_backward is engine and torch.nn.Module.to is to
    assert not torch.overrides._get_current_function_mode_stack()


def test_it_cannot_be_nested(device):
    with pytest.raises(RuntimeError, match="first"), pretend_cuda.cuda_pretended():
        pass


def test_a_device_of_another_kind_must_be_left_first():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    with Mode(), pytest.raises(RuntimeError, match="megatron_on_cpu"), pretend_cuda.cuda_pretended():
        pass
    assert megatron_on_cpu  # whose mode it is


# Faults


@pytest.mark.parametrize(
    "operation",
    [
        lambda tensor: tensor + torch.ones(6),
        lambda tensor: torch.mm(tensor.view(2, 3), torch.ones(3, 2)),
        lambda tensor: torch.cat([tensor, torch.ones(1)]),
        lambda tensor: tensor.index_select(0, torch.tensor([1])),
        lambda tensor: torch.where(tensor > 2, tensor, torch.zeros(6)),
        lambda tensor: tensor.gather(0, torch.tensor(1)),
    ],
)
def test_a_tensor_of_the_cpu_beside_one_of_the_device_is_a_fault(device, operation):
    with pretend_cuda.counted() as counts, pytest.raises(DeviceFaultError, match=r"CPU.*test_pretend_cuda\.py:\d+"):
        operation(row(device))
    assert counts.faults.total() == 1


def test_a_number_of_the_cpu_is_none(device):
    assert (row(device) * torch.tensor(2.0)).tolist() == [0, 2, 4, 6, 8, 10]


def test_an_assertion_of_the_device_is_a_fault(device):
    torch._assert_async(torch.ones(1, device=device))
    with pytest.raises(DeviceFaultError, match="assertion"):
        torch._assert_async(torch.zeros(1, device=device))


# Host reads and copies

READS = {
    "item": lambda tensor: tensor[0].item(),
    "bool": lambda tensor: bool(tensor[0]),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "copy_": lambda tensor: torch.empty(6).copy_(tensor),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 2],
    "unique": lambda tensor: tensor.unique(),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "repeat_interleave": lambda tensor: tensor.repeat_interleave(tensor.long()),
    "synchronize": lambda tensor: torch.cuda.synchronize(),
    "event": lambda tensor: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", READS)
def test_what_the_host_waits_for_is_counted_with_its_place(device, name):
    tensor = row(device)
    counts = counts_of(lambda: READS[name](tensor))
    assert counts.host_reads.total() == 1, counts.told("host_reads")
    assert "test_pretend_cuda.py:" in counts.told("host_reads")


FREE = {
    "sizes": lambda tensor: tensor.view(2, 3).size(0) + tensor.numel(),
    "fill by a mask": lambda tensor: tensor.clone().__setitem__(tensor > 2, 0.0),
    "where": lambda tensor: torch.where(tensor > 2, tensor, 0.0),
    "repeat_interleave": lambda tensor: tensor.repeat_interleave(tensor.long(), output_size=15),
    "to the host, not waited for": lambda tensor: torch.empty(6, pin_memory=True).copy_(tensor, non_blocking=True),
}


@pytest.mark.parametrize("name", FREE)
def test_the_host_does_not_wait_for_these(device, name):
    tensor = row(device)
    counts = counts_of(lambda: FREE[name](tensor))
    assert not counts.host_reads and not counts.blocking_copies


def test_the_host_does_not_wait_for_an_event_that_it_knows_to_have_happened(device):
    event = torch.cuda.Event()
    event.synchronize()  # was never recorded
    event.record()
    assert event.query()
    assert not counts_of(event.synchronize).host_reads
    event.record()
    assert counts_of(event.synchronize).host_reads


def test_what_a_test_does_itself_is_not_counted(device):
    with pretend_cuda.counted() as counts, pretend_cuda.uncounted():
        row(device).tolist()
    assert counts.totals() == dict.fromkeys(counts.totals(), 0)


BLOCKING = {
    "tensor": lambda tensor: torch.tensor([1.0], device="cuda"),
    "new_tensor": lambda tensor: tensor.new_tensor([1.0, 2.0]),
    "as_tensor": lambda tensor: torch.as_tensor([1.0], device=0),
    "cuda": lambda tensor: torch.ones(3).cuda(),
    "to": lambda tensor: torch.ones(3).to(tensor.device),
    "to, as another": lambda tensor: torch.ones(3).to(tensor),
    "copy_": lambda tensor: tensor.copy_(torch.ones(6)),
    "index of the host": lambda tensor: tensor[torch.tensor([1, 2])],
    "list": lambda tensor: tensor[[1, 2]],
}


@pytest.mark.parametrize("name", BLOCKING)
def test_a_copy_to_the_device_blocks(device, name):
    tensor = row(device)
    counts = counts_of(lambda: BLOCKING[name](tensor))
    assert counts.blocking_copies.total() == 1 and not counts.host_reads


def test_a_copy_that_is_not_waited_for(device):
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned()
    counts = counts_of(lambda: pinned.to(device, non_blocking=True))
    assert counts.asynchronous_copies.total() == 1 and not counts.blocking_copies


def test_lists_pick_the_right_values(device):
    tensor = row(device, 12).view(3, 4)
    assert tensor[[0, 2]].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]] and tensor[:, [1]].tolist() == [[1], [5], [9]]
    tensor[[1], [2]] = 9.0
    assert tensor[1].tolist() == [4, 5, 9, 7]


# Launches


def test_launches_and_bytes_are_those_that_touch_memory(device):
    tensor = row(device)
    counts = counts_of(lambda: torch.empty_like(tensor).copy_(tensor.view(2, 3).t().reshape(6)).add_(1))
    assert {event.what: number for event, number in counts.launches.items()} == {"clone": 1, "copy_": 1, "add_": 1}
    assert counts.bytes_moved.total() == 3 * 2 * 6 * 4


def test_another_dtype_is_a_launch_and_no_copy(device):
    tensor = row(device)
    counts = counts_of(lambda: tensor.to(device, torch.bfloat16))
    assert counts.totals() | {"launches": 1, "bytes_moved": 36} == counts.totals()


def test_what_there_is_more_of(device):
    tensor = row(device)
    few, many = counts_of(lambda: tensor.add(1)), counts_of(lambda: tensor.add(1).sum().item())
    assert many.beyond(few) == {"launches": 1, "bytes_moved": 28, "host_reads": 1} and few.beyond(many) == {}
    assert "sum at" in many.told("launches", few)


# Modules and autograd


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.first.weight.partition_dim = 1

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)) * self.scale)


def trained(net, x):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [values_of(weight.detach()) for weight in net.parameters()]


def test_training_gives_the_same_bits_as_on_the_cpu():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4, requires_grad=True)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    right = trained(net, x)
    again = Net()
    again.load_state_dict(state)
    with pretend_cuda.cuda_pretended():
        found = trained(again.cuda(), x.detach().cuda().requires_grad_())
    assert all(map(torch.equal, found, right))


MOVES = [lambda net: net.cuda(), lambda net: net.to("cuda"), lambda net: net.to(device="cuda")]


@pytest.mark.parametrize("move", MOVES)
def test_a_module_moves_with_the_attributes_of_its_weights(device, move):
    net = move(Net())
    assert net.first.weight is net.second.weight and net.first.weight.partition_dim == 1
    assert all(value.is_cuda for value in (*net.parameters(), *net.buffers()))
    assert isinstance(net.first.weight, torch.nn.Parameter) and net.first.weight.requires_grad


def test_backward_runs_in_a_thread_of_the_device(device):
    local, found = threading.local(), []
    local.value = 1

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append((threading.current_thread().name, hasattr(local, "value")))
            return grad

    def step():
        Asks.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()

    counts = counts_of(step)
    assert found[0][0].startswith(pretend_cuda.THREAD) and not found[0][1]
    assert any(name.startswith(pretend_cuda.THREAD) for name in counts.threads)


def test_an_error_in_backward_reaches_the_caller(device):
    tensor = torch.ones(2, device=device, requires_grad=True)
    output = tensor * 2
    output.register_hook(lambda grad: grad + torch.ones(2))
    with pytest.raises(DeviceFaultError, match="beside tensors of the device"):
        output.sum().backward()


# Triton kernels

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_a_kernel_is_interpreted_and_counted(device):
    from shim.ops.logprob import token_logprobs

    logits, target = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    right = token_logprobs(logits, target).logprob
    moved = logits.cuda(), target.cuda()
    with pretend_cuda.counted() as counts:
        found = token_logprobs(*moved).logprob
    assert torch.allclose(values_of(found), right)
    assert "_statistics_kernel" in counts.told("launches") and not counts.host_reads


@needs_triton
def test_a_kernel_that_gets_memory_of_the_host_is_a_fault(device):
    from shim.ops import _logprob_triton

    arguments = [torch.ones(2)] * len(_logprob_triton._statistics_kernel.arg_names)
    with pytest.raises(DeviceFaultError, match="Triton kernel _statistics_kernel"):
        _logprob_triton._statistics_kernel[(1,)](*arguments)


# CUDA graphs


def test_a_graph_computes_again_from_what_is_in_its_memory(device):
    weight = torch.full((3,), 2.0, device=device)
    given = torch.ones(3, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (given * weight).view(3, 1)
        total = torch.zeros((), device=device)
        total += result.sum()
    given.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert result.flatten().tolist() == [2, 4, 6] and total.item() == 12
    graph.replay()
    assert total.item() == 12


def test_a_capture_computes_nothing(device):
    counter = torch.zeros(2, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        counter[1] += 1
    assert counter.tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert counter.tolist() == [2, 4]


def test_a_graph_that_uses_memory_that_was_freed_since_is_a_fault(device):
    kept, freed = torch.ones(2, device=device), torch.ones(3, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = freed * 2
        kept.add_(inside[:2])
    graph.replay()
    del freed
    with pytest.raises(DeviceFaultError, match=r"freed since: \(3,\)"):
        graph.replay()


NOT_WHILE_CAPTURING = {
    "read": lambda tensor: tensor.sum().item(),
    "copy": lambda tensor: torch.tensor([1.0], device="cuda"),
    "copy of memory that is not pinned": lambda tensor: torch.ones(1).to("cuda", non_blocking=True),
    "pinned memory": lambda tensor: torch.empty(3, pin_memory=True),
    "query": lambda tensor: torch.cuda.Event().query(),
    "synchronize": lambda tensor: torch.cuda.current_stream().synchronize(),
    "size": lambda tensor: tensor[tensor > 1],
}


@pytest.mark.parametrize("name", NOT_WHILE_CAPTURING)
def test_what_is_not_permitted_while_capturing_raises(device, name):
    tensor = row(device)
    with pretend_cuda.counted() as counts, pytest.raises(CaptureError, match="while a stream is capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            NOT_WHILE_CAPTURING[name](tensor)
    assert counts.faults.total() == 1 and not torch.cuda.is_current_stream_capturing()


def test_a_wait_for_an_event_of_before_the_capture_raises(device):
    event = torch.cuda.current_stream().record_event()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().record_event().wait()
        with pytest.raises(CaptureError, match="recorded outside"):
            event.wait()


# Collectives


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nccl_takes_tensors_of_the_device(device, one_rank):
    tensor = row(device)

    def messages():
        dist.all_reduce(tensor)
        dist.barrier()
        dist.all_gather_object([None], {"an": "object"})

    counts = counts_of(messages)
    assert not counts.refused_by_nccl, counts.told("refused_by_nccl")
    assert "allreduce_" in counts.told("collectives")


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (lambda: torch.ones(2), "a tensor of the CPU"),
        (lambda: torch.ones(2, device="cuda", dtype=torch.int16), "int16"),
        (lambda: torch.ones(2, 3, device="cuda").t(), "a tensor with gaps"),
    ],
)
def test_what_nccl_would_refuse_is_counted(device, one_rank, tensor, reason):
    given = tensor()

    def broadcast():
        with contextlib.suppress(RuntimeError, ValueError):  # gloo refuses some of them, too
            dist.broadcast(given, 0)

    assert reason in counts_of(broadcast).told("refused_by_nccl")
