# Shared by the lab's scripts: where caches lie, how things are named, how they speak.
set -euo pipefail

LAB_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PROJECT_DIR=$(dirname "$LAB_DIR")
# Not set for services and cron; Ansible and pip want it too.
export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
LAB_CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/metalserve/lab
# The project's virtual environment, made by `make venv`.
LAB_PYTHON=$PROJECT_DIR/.venv/bin/python

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'lab: %s\n' "$*" >&2; exit 1; }

# The first 16 hex digits of the hash of the given files' names and contents.
inputs_hash() {
  (cd "$PROJECT_DIR" && sha256sum -- "$@") | sha256sum | cut -c1-16
}

image_exists() { docker image inspect "$1" >/dev/null 2>&1; }
