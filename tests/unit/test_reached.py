"""Which of upstream's functions run while a proof runs."""

import json

from unit_helpers import output_of, write_file

from shim._proving.reached import spots_of
from shim._releases.sources import Sources

MODULE = """
    import functools

    def called():
        return inner()

    def inner():
        return 1

    @functools.lru_cache
    def decorated():
        return 2

    def never():
        return 3

    class Layer:
        def forward(self):
            return called()

        def backward(self):
            return never()

    class Empty:
        pass

    NAME = 4
"""
TARGETS = ("called", "inner", "decorated", "never", "Layer", "Layer.forward", "Layer.backward", "NAME", "missing")


def test_functions_and_classes_have_spots_and_names_have_none(tmp_path):
    write_file(tmp_path / "upstream.py", MODULE)
    spots = spots_of(Sources([tmp_path]), {f"upstream:{name}": f"upstream:{name}" for name in TARGETS})
    assert [target for target, *_ in spots] == [f"upstream:{name}" for name in TARGETS[:-2]]


def test_what_is_called_is_noted_here_in_threads_and_in_forked_processes(tmp_path):
    """And nothing else: a function that was only defined has not run."""
    write_file(tmp_path / "upstream.py", MODULE)
    (tmp_path / "noted").mkdir()
    spots = spots_of(Sources([tmp_path]), {f"upstream:{name}": f"upstream:{name}" for name in TARGETS})
    text = output_of(
        f"""
        import json, os, threading
        from pathlib import Path
        from shim._proving.reached import reached_in, watch
        watch({spots!r}, Path({str(tmp_path / "noted")!r}))
        import upstream
        upstream.decorated()
        thread = threading.Thread(target=upstream.inner); thread.start(); thread.join()
        if os.fork() == 0:
            upstream.Layer().forward()
            os._exit(0)
        os.wait()
        print(json.dumps(reached_in(Path({str(tmp_path / "noted")!r}))))
        """,
        tmp_path,
    )
    assert json.loads(text) == [
        f"upstream:{name}" for name in ("Layer", "Layer.forward", "called", "decorated", "inner")
    ]


def test_the_definition_that_a_class_inherits_counts(tmp_path):
    """The target is on the subclass, and the body that runs is that of the base."""
    write_file(tmp_path / "upstream.py", MODULE)
    [spot] = spots_of(Sources([tmp_path]), {"upstream:Sub.forward": "upstream:Layer.forward"})
    assert spot[0] == "upstream:Sub.forward" and spot[2:] == (17, 18)
