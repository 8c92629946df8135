# Sourced by the scripts beside it: makes and refreshes the virtual environment.
# shellcheck shell=bash
#
#   make_venv GROUP [SUFFIX]
#
# Sets `root` (the repository) and `venv` (its environment), with the project installed in
# editable form together with a dependency group of pyproject.toml. The environment is .venv,
# made with python3; with PYTHON given it is .venv-X.Y of that Python's own version, so that
# several versions live beside each other. A suffix names another one.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

make_venv() {
    local group=$1 suffix=${2:-} python=${PYTHON:-python3} version checksum stamp
    venv=$root/.venv$suffix
    if [[ -n ${PYTHON:-} ]]; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || {
            echo "precpass: PYTHON=$PYTHON does not run" >&2
            return 1
        }
        venv=$root/.venv-$version$suffix
    fi
    # A folder whose pip does not run was left half made, or its Python is gone.
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "precpass: $python is not there or older than Python 3.11; name another: PYTHON=..." >&2
            return 1
        }
        echo "precpass: making ${venv##*/}" >&2
        "$python" -m venv --clear "$venv" || return 1
    fi
    checksum=$("$venv/bin/python" -c '
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest())
' "$root/pyproject.toml") || return 1
    stamp=$venv/.precpass-$group
    if [[ ! -f $stamp || $(<"$stamp") != "$checksum" ]]; then
        echo "precpass: installing the project and its group '$group' into ${venv##*/}" >&2
        install_project "$group" || return 1
        echo "$checksum" >"$stamp"
    fi
}

# uv is much faster than pip. Where it cannot be had, or cannot reach what pip is set up to
# reach, pip does the same; dependency groups need its version 25.1. Like pip it compiles what it
# installs: where PYTHONDONTWRITEBYTECODE is set, every process would compile all that it imports.
install_project() {
    local group=$1 python=$venv/bin/python
    # Like pip, trust the machine's own certificates. The second name is older uv's.
    export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} UV_NATIVE_TLS=${UV_NATIVE_TLS:-true}
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    if "$python" -m pip install --quiet uv &&
        (cd "$root" && "$python" -m uv pip install --compile-bytecode --python "$python" --editable . --group "$group"); then
        return 0
    fi
    echo "precpass: uv could not do it; installing with pip, which takes some minutes" >&2
    "$python" -m pip install --quiet --upgrade 'pip>=25.1' &&
        (cd "$root" && "$python" -m pip install --quiet --editable . --group "$group")
}

# XLA's compilers for GPUs (182 MB) and TPUs (137 MB), of the installed release of JAX.
install_compilers() {
    local release
    release=$("$venv/bin/python" -c 'import jax; print(jax.__version__)') || return 1
    export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} UV_NATIVE_TLS=${UV_NATIVE_TLS:-true}
    "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" "jax[tpu]==$release" \
        "jax-cuda12-plugin==$release" "jax-cuda12-pjrt==$release" ||
        "$venv/bin/python" -m pip install --quiet "jax[tpu]==$release" \
            "jax-cuda12-plugin==$release" "jax-cuda12-pjrt==$release"
}

# Passes pytest on both cores. The tests differ much in length: an idle worker takes some of the
# other's. Bytecode is written in any case, because otherwise pytest rewrites the asserts of all
# tests for each worker in each run.
run_pytest() {
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m pytest -n 2 --dist worksteal "$@"
}

# The closing line of a script of tests, which `.ci/run` reads back.
say_versions() {
    "$venv/bin/python" -c '
import platform, jax
print(f"precpass: tested with Python {platform.python_version()}, jax {jax.__version__}")
'
}
