#!/bin/sh
# Runs what can differ between Pythons, and needs no torch, on the oldest and the newest other one: syntax trees, files and
# metadata, the import system, descriptors and signatures. With SHIM_TEST_EVERY_FILE=1 all that needs no torch, and on
# 3.12 too, which stands between two that run as much.
# PYTHON is the one that has run all of it already.
# A Python that is not there, or whose packages cannot be installed (offline), is reported and skipped.

set -u
cd "$(dirname "$0")/.." || exit 1

# shellcheck source=tests/find_python.sh
. tests/find_python.sh

files="
    tests/unit/test_fingerprint.py
    tests/unit/test_sources.py
    tests/unit/test_detect.py
    tests/unit/test_config_override.py
    tests/engine/test_imports.py
    tests/engine/test_bind.py
    tests/engine/test_foreign.py
    tests/engine/test_stand_ins.py
    tests/engine/test_odd_namespaces.py
    tests/engine/test_exception_notes.py
"
versions="3.10 3.13"
marks="not growth and not one_python"
jobs=  # a few files take longer to be collected three times than to be run
if [ "${SHIM_TEST_EVERY_FILE:-}" = 1 ]; then
    marks="not growth"
    jobs="-n 3"
    files="tests/unit tests/engine"
    versions="3.10 3.12 3.13"
fi

done_already=
if [ -n "${PYTHON:-}" ]; then
    done_already=$("$PYTHON" -c "$ask")
fi
failed=0
for version in $versions; do
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
        # With the pip that is there: to make another takes longer than some of the tests.
        if ! said=$({ "$python" -m venv --without-pip "$venv" &&
            "${PYTHON:-$python}" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check \
                pytest pytest-xdist hypothesis "packaging>=23.2" "PyYAML>=6.0" "setuptools>=78"; } 2>&1); then
            echo "skipped: python$version, because its packages cannot be installed:"
            echo "$said" | tail -n 3
            rm -rf "$venv"
            continue
        fi
        touch "$venv/.ready"
    fi
    echo "python$version ($python)"
    # shellcheck disable=SC2086 # lists, of which no part has a space
    PYTHONPATH=. "$venv/bin/python" -m pytest -q $jobs -p no:cacheprovider -m "$marks" $files || failed=1
done
exit $failed
