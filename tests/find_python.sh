# For scripts that read it: find_python 3.10 prints the path of that Python.
# shellcheck shell=sh

ask='import sys; print("%d.%d" % sys.version_info[:2])'

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
