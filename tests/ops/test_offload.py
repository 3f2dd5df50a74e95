"""shim.offload on small modules: what is moved, refused, and said; on the pretended CUDA."""

import gc
import linecache
import sys
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from thorough import times  # noqa: E402
from torch import nn  # noqa: E402

import shim  # noqa: E402
from shim._offload import memory  # noqa: E402
from shim.testing import pretend_cuda  # noqa: E402
from shim.testing.pretend_cuda import values_of  # noqa: E402


@pytest.fixture(autouse=True)
def device():
    with pretend_cuda.cuda_pretended():
        yield


class Net(nn.Module):
    """Tied weights, a buffer, and a table that is none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.cuda()
        self.table = torch.arange(4.0, device="cuda")

    def forward(self, x):
        return self.second(self.first(x) * self.scale + self.table)


X = torch.arange(8.0).view(2, 4)


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    net(X.cuda()).sum().backward()
    return net


@pytest.fixture
def adam(net):
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    adam.step()
    return adam


def values(net, adam):
    tensors = [*net.parameters(), *net.buffers(), net.table, *(weight.grad for weight in net.parameters())]
    return [values_of(each.detach()).clone() for each in (*tensors, *states(adam))]


def states(adam):
    return [value for state in adam.state.values() for value in state.values() if value.is_cuda]


def held(net, adam):
    """The bytes of the device."""
    tensors = [*net.parameters(), *net.buffers(), net.table, *(weight.grad for weight in net.parameters())]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*tensors, *states(adam))}.values())


def same(one, other):
    return all(map(torch.equal, one, other))


def total(parts):
    return sum(parts.values())


def test_all_comes_back_in_the_same_tensors(net, adam):
    right, before, weights = values(net, adam), held(net, adam), [*net.parameters()]
    view = net.first.weight.detach()[1]
    versions = [weight._version for weight in weights]
    with shim.offload(net, adam) as asleep:
        assert held(net, adam) == 0 and asleep.left == {}
    assert held(net, adam) == before and same(values(net, adam), right)
    assert all(one is other for one, other in zip(weights, net.parameters()))
    assert view.tolist() == net.first.weight[1].tolist() and versions == [weight._version for weight in weights]


def test_bytes_by_kind_and_parameter(net, adam):
    asleep = shim.offload(net, adam)
    assert asleep.freed == {
        "weights": {"first.weight": 64, "first.bias": 16, "scale": 16, "table": 16},
        "gradients": {"first.weight": 64, "first.bias": 16},
        "optimizer": {"first.weight": 128, "first.bias": 32},
    }
    assert str(asleep).startswith("bytes freed: weights 112, gradients 80, optimizer 160")
    asleep.restore()


@pytest.mark.parametrize("kind", ["optimizer", "gradients", "weights"])
def test_one_kind_alone(net, adam, kind):
    right, before = values(net, adam), held(net, adam)
    asleep = shim.offload(net, adam, what=kind)
    assert before - held(net, adam) == total(asleep.freed.pop(kind)) and not asleep.freed
    assert kind not in asleep.left and {part.why for parts in asleep.left.values() for part in parts.values()} == {
        "not asked for"
    }
    asleep.restore()
    assert same(values(net, adam), right)


def test_weights_and_gradients_in_one_memory_move_together(net):
    memory = torch.zeros(16, device="cuda")
    net.first.weight.main_grad = memory[:8]
    net.first.weight.data = memory.view(4, 4)
    asleep = shim.offload(net, what="weights")
    assert asleep.left["weights"]["first.weight"].why == "shares memory with gradients"
    assert memory.untyped_storage().nbytes()
    both = shim.offload(net, what=("weights", "gradients"))
    assert not memory.untyped_storage().nbytes()
    both.restore()
    asleep.restore()
    assert memory.tolist() == [0.0] * 16


def test_states_in_one_memory_have_the_names_of_their_weights(net):
    flat = torch.zeros(20, device="cuda")
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    sgd.state[net.first.weight]["momentum_buffer"] = flat[:16].view(4, 4)
    sgd.state[net.first.bias]["momentum_buffer"] = flat[16:]
    with shim.offload(net, sgd) as asleep:
        assert asleep.freed["optimizer"] == {"first.weight": 64, "first.bias": 16}


def test_a_view_of_a_weight_that_the_optimizer_steps_on_is_the_weight(net):
    shard = net.first.weight.detach().view(-1)[:8]
    with shim.offload(net, torch.optim.SGD([shard], lr=0.1), what="weights") as asleep:
        assert asleep.freed["weights"]["first.weight"] == 64 and "main_weights" not in asleep.left


def test_a_view_of_memory_that_sleeps_is_left_alone(net):
    """torch cannot say whether such a view is a leaf, once its base has changed in place."""
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    sgd.param_groups[0]["params"] = [net.first.weight.view(-1)[8:]]  # as that of a distributed optimizer in fp32
    with torch.no_grad():
        net.first.weight.add_(1)
    with shim.offload(net, what="weights"), shim.offload(net, sgd) as rest:
        assert rest.freed.keys() == {"gradients"}


def test_memory_of_others_stays_and_is_named(net):
    stuck = torch.zeros(4).numpy()
    net.foreign = torch.zeros(4, device="cuda")
    net.foreign.values = torch.from_numpy(stuck)
    asleep = shim.offload(net)
    assert asleep.left == {"weights": {"foreign": (16, "its memory belongs to other code and cannot be freed")}}
    asleep.restore()


def test_bytes_that_are_no_whole_elements_stay(net):
    net.odd = torch.zeros(7, dtype=torch.uint8, device="cuda")[:4].view(torch.float32)
    with shim.offload(net) as asleep:
        assert {name: part.why for name, part in asleep.left["weights"].items()} == {
            "odd": "its bytes are no whole number of elements",
            "padding beside odd": "its bytes are no whole number of elements",
        }


def test_gradients_that_are_zero_are_not_copied(net, adam):
    for weight in net.parameters():
        weight.grad.zero_()
    before = [values_of(weight.grad).clone() for weight in net.parameters()]
    with pretend_cuda.counted() as counts:
        asleep = shim.offload(net, adam, what="gradients")
        assert total(asleep.freed["gradients"]) == 80
        asleep.restore()
    assert not counts.asynchronous_copies and same([values_of(weight.grad) for weight in net.parameters()], before)


def test_a_negative_zero_is_not_zero(net):
    net.first.bias.grad.fill_(-0.0)
    shim.offload(net, what="gradients").restore()
    assert torch.signbit(values_of(net.first.bias.grad)).all()


def test_copies_are_pinned_and_waited_for_once(net, adam):
    with pretend_cuda.counted() as counts:
        asleep = shim.offload(net, adam, what=("optimizer", "weights"))
        asleep.restore()
    assert not counts.blocking_copies and counts.asynchronous_copies.total() == 2 * 8  # of eight storages
    assert counts.host_reads.total() == 4  # the device and the stream, both ways


def test_messages_under_way_are_waited_for_before_anything_is_read(net):
    """A sum of gradients over ranks still writes."""
    arrives = mock.Mock(wait=lambda: net.first.bias.grad.fill_(3.0))
    net.bucket_groups = [SimpleNamespace(param_gather_handle=None, grad_reduce_handle=arrives)]
    shim.offload(net, what="gradients").restore()
    del net.bucket_groups
    assert net.first.bias.grad.tolist() == [3.0] * 4


def test_the_device_gets_the_memory_from_torch(net, adam):
    held_then = []
    with mock.patch.object(torch.cuda, "empty_cache", lambda: held_then.append(held(net, adam))):
        shim.offload(net, adam).restore()
    assert held_then == [0]


def chunks(net):
    return [chunk.data_ptr() for chunk in memory._SPARE.get(net, [])]


def test_host_memory_is_reused_while_the_model_lives(net, adam):
    shim.offload(net, adam).restore()
    first = chunks(net)
    assert all(chunk.is_pinned() for chunk in memory._SPARE[net])
    one, other = shim.offload(net, adam, what="weights"), shim.offload(net, adam, what="optimizer")
    one.restore()
    other.restore()
    assert first and first[0] in chunks(net)
    several = chunks(net)
    for _ in range(3):
        with shim.offload(net, adam, what="weights"), shim.offload(net, adam, what="optimizer"):
            pass
    assert sorted(chunks(net)) == sorted(several)
    shim.offload(net, adam, pin=False).restore()
    assert not any(chunk.is_pinned() for chunk in memory._SPARE[net])
    kept = weakref.ref(memory._SPARE[net][0])
    memory._SPARE.pop(net)
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_storages_that_lie_across_chunks(net, adam, size):
    right = values(net, adam)
    with mock.patch.object(memory, "_CHUNK", size):
        shim.offload(net, adam, pin=False).restore()
    assert same(values(net, adam), right)


# Again, nested, at once


def test_again_and_nested_in_any_order(net, adam):
    right = values(net, adam)
    states_ = shim.offload(net, adam, what="optimizer")
    rest = shim.offload(net, adam)
    assert "optimizer" not in rest.freed and held(net, adam) == 0
    assert shim.offload(net, adam).freed == {}
    states_.restore()
    states_.restore()
    assert "optimizer" not in shim.offload(net, adam, what="weights").freed
    with pytest.raises(shim.OffloadError, match=r"Adam.step\(\) needs what is asleep.*test_offload.py:\d+"):
        adam.step()
    rest.restore()
    adam.step()
    assert not same(values(net, adam), right)


def test_from_many_threads(net, adam):
    right, failed = values(net, adam), []

    def sleeps():
        try:
            for _ in range(5):
                shim.offload(net, adam, pin=False).restore()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=sleeps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and same(values(net, adam), right)


# Errors


def test_what_needs_weights_is_refused(net, adam):
    inside = pytest.raises(shim.OffloadError, match=r"weights, by shim.offload")
    with shim.offload(net, adam, what="weights"):
        for call in (lambda: net(X.cuda()), net.state_dict, lambda: net.load_state_dict({}), lambda: net.second(X)):
            with inside:
                call()
    net(X.cuda())
    assert all(not {"forward", "_save_to_state_dict", "step"} & vars(each).keys() for each in (*net.modules(), adam))


def test_without_states_the_model_runs_and_is_saved(net, adam):
    with shim.offload(net, adam, what=("optimizer", "gradients")):
        with torch.no_grad():
            net(X.cuda())
        net.state_dict()
        with pytest.raises(shim.OffloadError, match="gradients"):
            net(X.cuda())  # of which a backward pass may follow
        for call in (adam.step, adam.state_dict, adam.zero_grad):
            with pytest.raises(shim.OffloadError, match=r"optimizer|gradients"):
                call()
    adam.state_dict()


def test_a_method_that_others_have_put_on_an_object_comes_back(net, adam):
    adam.step = mine = lambda: "mine"
    with shim.offload(net, adam), pytest.raises(shim.OffloadError):
        adam.step()
    assert adam.step is mine


def test_what_wrapped_a_refusal_meanwhile_calls_through(net, adam):
    asleep = shim.offload(net, adam)
    adam.step = wrapper = (lambda found: lambda: found())(adam.step)
    asleep.restore()
    assert adam.step is wrapper
    adam.step()


@pytest.mark.parametrize("place", [0, 3])
def test_a_copy_that_fails_moves_nothing(net, adam, place):
    right, before, copy, calls = values(net, adam), held(net, adam), torch.Tensor.copy_, []

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) > place:
            raise RuntimeError("no")
        return copy(*args, **kwargs)

    with mock.patch.object(torch.Tensor, "copy_", fails):
        with pytest.raises(shim.OffloadError, match=r"352 bytes cannot be copied to the host: no. Nothing was moved"):
            shim.offload(net, adam)
    assert held(net, adam) == before and same(values(net, adam), right)
    adam.step()


def test_too_little_memory_of_the_host(net, adam):
    with mock.patch.object(memory, "torch", mock.Mock(empty=mock.Mock(side_effect=RuntimeError("out of memory")))):
        with pytest.raises(shim.OffloadError, match="Free memory of the host, pass pin=False"):
            shim.offload(net, adam)


class Failing:
    """A storage that cannot be resized at the given calls."""

    def __init__(self, storage, fails):
        self.storage, self.fails, self.calls = storage, fails, 0

    def __getattr__(self, name):
        return getattr(self.storage, name)

    def resize_(self, size):
        self.calls += 1
        if self.calls in self.fails:
            raise MemoryError("device full")
        self.storage.resize_(size)


def test_too_little_memory_of_the_device(net, adam):
    right, before = values(net, adam), held(net, adam)
    asleep = shim.offload(net, adam)
    piece = asleep._copy.pieces[4]
    piece.storage = Failing(piece.storage, {1})
    with pytest.raises(shim.OffloadError, match=r"device full.*All of it is still on the host.*call restore\(\) again"):
        asleep.restore()
    assert held(net, adam) == 0
    with pytest.raises(shim.OffloadError):
        adam.step()
    asleep.restore()
    assert held(net, adam) == before and same(values(net, adam), right)


class Interrupt:
    """Raises at the n-th line or return within shim/_offload, as Ctrl-C does. None are left: it has raised."""

    def __init__(self, at):
        self.left = at

    def trace(self, frame, event, _):
        if "_offload" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            return None
        # CPython loses the end of a with-block to an interrupt just before it (bpo-29988), and a lock with it.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace

    def during(self, call):
        sys.settrace(self.trace)
        try:
            done = call()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)
        assert self.left > 0, "the interrupt was swallowed"
        return done


def swept(net, adam, begin, after, stride):
    """Interrupts one call at each place in turn. begin: makes the call. after: looks, and cleans up."""
    place = 1
    while True:
        call, interrupt = begin(), Interrupt(place)
        done = interrupt.during(call)
        after(done)
        assert not any(type(each).__name__ == "_Refusal" for o in (*net.modules(), adam) for each in vars(o).values())
        if interrupt.left > 0:
            return place
        place += stride


def test_an_interrupt_anywhere_in_a_sleep_moves_nothing(net, adam):
    right, before = values(net, adam), held(net, adam)

    def after(asleep):
        if asleep is not None:
            asleep.restore()
        assert held(net, adam) == before and same(values(net, adam), right)

    places = swept(net, adam, lambda: lambda: shim.offload(net, adam), after, times(61, 1))
    assert places > 500
    adam.step()


def test_an_interrupt_anywhere_in_a_restore_loses_nothing(net, adam):
    right, before, handles = values(net, adam), held(net, adam), []

    def begin():
        handles.append(shim.offload(net, adam))
        return handles[-1].restore

    def after(_):
        handles[-1].restore()
        assert held(net, adam) == before and same(values(net, adam), right)

    places = swept(net, adam, begin, after, times(5, 1))
    assert places > 50
    adam.step()


def test_what_others_have_woken_is_not_overwritten(net, adam):
    asleep = shim.offload(net, adam)
    net.first.bias.untyped_storage().resize_(16)
    with pytest.raises(shim.OffloadError, match=r"weights of first.bias got memory from other code"):
        asleep.restore()
    net.first.bias.untyped_storage().resize_(0)
    asleep.restore()


def test_an_error_inside_the_context_wakes_too(net, adam):
    right = values(net, adam)
    with pytest.raises(KeyError), shim.offload(net, adam):
        raise KeyError
    assert same(values(net, adam), right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: setattr(net, "param_and_grad_buffer", 1), "Megatron-FSDP"),
        (lambda net: setattr(net, "cuda_graphs", [1]), "CUDA graphs.*Leave weights and gradients out"),
        (lambda net: setattr(net, "cudagraph_manager", mock.Mock(cudagraph_runners=[1])), "CUDA graphs"),
        (lambda net: setattr(net, "ddp_config", mock.Mock(nccl_ub=True)), "registered with NCCL"),
    ],
)
def test_what_cannot_sleep_is_refused_before_anything_moves(net, adam, change, message):
    change(net)
    before = held(net, adam)
    with pytest.raises(shim.OffloadError, match=message):
        shim.offload(net, adam)
    assert held(net, adam) == before


class Wrapper:
    """Of a trainer's own package."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.parametrize(
    ("models", "what", "message"),
    [
        ([], "weights", "takes a model or several"),
        (None, "weights", "takes a model or several.*not NoneType"),
        ([[]], "weights", "takes a model or several.*not list"),
        (..., "weight", "what='weight'.*'optimizer', 'main_weights', 'gradients', 'weights'"),
        (..., ("optimizer", 1), "what=1"),
    ],
)
def test_a_wrong_argument_is_named(net, models, what, message):
    with pytest.raises(shim.OptionError, match=message):
        shim.offload(net if models is ... else models, what=what)


def test_an_optimizer_that_cannot_be_looked_into_is_refused(net, adam):
    """Its states would stay on the device, and nothing would say so."""
    before = held(net, adam)
    for optimizer in (Wrapper(adam), [adam, Wrapper(adam)], "adam"):
        with pytest.raises(shim.OptionError, match=r"cannot look into .*(Wrapper|str)"):
            shim.offload(net, optimizer)
    assert held(net, adam) == before
    for optimizer in (None, [], [adam, None]):
        shim.offload(net, optimizer).restore()


def test_on_the_cpu_nothing_moves():
    net = nn.Linear(2, 2)
    net.to = None
    with shim.offload(net) as asleep:
        assert asleep.freed == asleep.left == {}
        net(torch.ones(2))


# What holds its data in attributes


class Quantized(torch.Tensor):
    """As those of Transformer Engine in FP8: no memory, and its data and scale in attributes."""

    @staticmethod
    def __new__(cls, data, scale):
        make = torch.Tensor._make_wrapper_subclass
        made = make(cls, data.shape, dtype=torch.bfloat16, device="cuda", requires_grad=False)
        made._data, made._scale_inv = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} is asked of a quantized weight")


def test_weights_in_fp8_and_their_caches(net):
    data, cached = torch.full((4,), 3, dtype=torch.uint8, device="cuda"), torch.ones(4, device="cuda")
    net.first._fp8_workspaces = {"weight": Quantized(cached, torch.ones(1, device="cuda"))}
    net.second._buffers["quantized"] = Quantized(data, torch.ones(1, device="cuda"))
    with shim.offload(net) as asleep:
        assert not data.untyped_storage().nbytes() and not cached.untyped_storage().nbytes()
        assert asleep.freed["weights"]["second.quantized"] == 8  # and its scale
        assert asleep.freed["weights"]["first._fp8_workspaces.weight"] == 20
    assert data.tolist() == [3] * 4 and cached.tolist() == [1.0] * 4


def test_scratch_is_dropped(net):
    te, core = {(2, torch.float32): torch.zeros(2, device="cuda")}, {"mpu": torch.zeros(3, device="cuda")}
    modules = {
        "transformer_engine.pytorch.module.base": SimpleNamespace(_dummy_wgrads=te),
        "megatron.core.parallel_state": SimpleNamespace(_GLOBAL_MEMORY_BUFFER=SimpleNamespace(buffer=core)),
    }
    with mock.patch.dict("sys.modules", modules):
        shim.offload(net, what="weights").restore()
        assert te and core
        asleep = shim.offload(net, what="gradients")
    assert not te and not core
    assert (asleep.freed["gradients"]["dummy gradients"], asleep.freed["gradients"]["workspace"]) == (8, 12)
    asleep.restore()
