#!/bin/sh
# Runs the tests that need no torch on every other Python there is. PYTHON is the one that has run them already.
# A Python that is not there, or whose packages cannot be installed (offline), is reported and skipped.

set -u
cd "$(dirname "$0")/.." || exit 1

# python3.10 from PATH or pyenv, the first that runs and is really of that version.
find_python() {
    for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if [ -n "$candidate" ] && [ "$("$candidate" -c "$ask" 2>/dev/null)" = "$1" ]; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

ask='import sys; print("%d.%d" % sys.version_info[:2])'
done_already=
if [ -n "${PYTHON:-}" ]; then
    done_already=$("$PYTHON" -c "$ask")
fi
failed=0
for version in 3.10 3.12 3.13; do
    if [ "$version" = "$done_already" ]; then
        continue
    fi
    if ! python=$(find_python "$version"); then
        echo "skipped: no python$version"
        continue
    fi
    venv=.venv-$version
    if [ ! -e "$venv/.ready" ]; then
        rm -rf "$venv"
        if ! said=$({ "$python" -m venv "$venv" &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
                pytest pytest-xdist hypothesis "packaging>=23.2" "PyYAML>=6.0" "setuptools>=70.1"; } 2>&1); then
            echo "skipped: python$version, because its packages cannot be installed:"
            echo "$said" | tail -n 3
            rm -rf "$venv"
            continue
        fi
        touch "$venv/.ready"
    fi
    echo "python$version ($python)"
    set --
    for tests in tests/unit tests/engine; do
        if [ -d "$tests" ]; then
            set -- "$@" "$tests"
        fi
    done
    PYTHONPATH=. "$venv/bin/python" -m pytest -q -n 2 -p no:cacheprovider -m "not growth" "$@" || failed=1
done
exit $failed
