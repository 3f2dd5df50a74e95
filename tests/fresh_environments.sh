#!/bin/sh
# Uses what lies in dist/ as a user does: in fresh environments, from an empty folder, on every Python there is.
#
# Everywhere: plan, doctor, matrix and audit with the wheel beside a release of megatron-core, and plan with what pip
# makes of the source distribution. On the Pythons of TORCH_ON, which gets torch as well: apply, check and prove.
# A Python that is not there is reported and skipped.

set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/find_python.sh
. tests/find_python.sh

PYTHONS=${PYTHONS:-3.10 3.11 3.12 3.13}
TORCH_ON=${TORCH_ON:-3.11}
TORCH=${TORCH:-torch==2.13.0}
RELEASE=${RELEASE:-0.16.1}
PATCH=${PATCH:-lr-param-groups}
dist=$PWD/dist
unset PYTHONPATH PYTHONHOME
for variable in $(env | sed -n 's/^\(MEGATRON_SHIM_[A-Z_]*\)=.*/\1/p'); do
    unset "$variable"
done

set -- "$dist"/megatron_shim-*.whl
wheel=$1
set -- "$dist"/megatron_shim-*.tar.gz
sdist=$1
if ! [ -f "$wheel" ] || ! [ -f "$sdist" ]; then
    echo "dist/ has no wheel or no source distribution: make dist"
    exit 1
fi

apply='
import shim
report = shim.apply()
import megatron.core.models.gpt.gpt_model
report = shim.check()
print(f"apply: {report.summary}")
assert report["mtp-packed-sequences"].state == "applied", report
assert "site-packages" in shim.__file__, shim.__file__
assert not shim.revert().applied
'

pip() {
    "$environment/bin/python" -m pip "$@"
}

# The environment of this Python, fresh, with these requirements.
fresh() {
    rm -rf "$environment"
    "$1" -m venv "$environment" || return 1
    shift
    pip install --quiet --disable-pip-version-check "$@" >"$folder/said" 2>&1 || { tail -n 20 "$folder/said"; return 1; }
}

# The output of a command, if it is to be read; its last line otherwise.
step() {
    if ! "$@" >"$folder/said" 2>&1; then
        echo "  failed: $*"
        tail -n 20 "$folder/said"
        return 1
    fi
    echo "  $(basename "$1") $(echo "$2" | head -n 1 | cut -c 1-40): $(grep -v '^ *$' "$folder/said" | tail -n 1 | cut -c 1-90)"
}

try_wheel() {
    fresh "$python" "$wheel" || return 1
    pip install --quiet --disable-pip-version-check --no-deps "megatron-core==$RELEASE" || return 1
    cd "$folder" || return 1
    step "$bin/shim" plan && step "$bin/megatron-shim" matrix && step "$bin/shim" explain "$PATCH" || return 1
    # doctor exits with 1 if something is amiss, which a megatron-core without torch is.
    "$bin/shim" doctor >"$folder/said" 2>&1
    grep -q "^megatron-shim .*site-packages" "$folder/said" || grep -q "site-packages/shim" "$folder/said" || return 1
    step "$bin/shim" audit "$("$bin/python" -c "import importlib.metadata as m; print(m.distribution('megatron-core').locate_file(''))")" || return 1
    case " $TORCH_ON " in
    *" $1 "*)
        pip install --quiet --disable-pip-version-check "$TORCH" numpy "megatron-core==$RELEASE" || return 1
        step "$bin/shim" doctor && step "$bin/python" -c "$apply" && step "$bin/shim" prove "$PATCH" || return 1
        ;;
    *) echo "  apply and prove skipped: no torch on this Python (TORCH_ON=$TORCH_ON)" ;;
    esac
}

try_sdist() {
    cd "$folder" && fresh "$python" "$sdist" && step "$bin/shim" list && step "$bin/python" -m shim matrix
}

failed=0
for version in $PYTHONS; do
    if ! python=$(find_python "$version"); then
        echo "skipped: no python$version"
        continue
    fi
    folder=$(mktemp -d)
    environment=$folder/environment
    bin=$environment/bin
    echo "python$version: $(basename "$wheel")"
    (try_wheel "$version") || failed=1
    echo "python$version: $(basename "$sdist")"
    (try_sdist) || failed=1
    rm -rf "$folder"
done
exit $failed
