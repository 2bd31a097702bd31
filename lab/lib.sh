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

# make_rootfs IMAGE SUITE PACKAGES [CUSTOMIZE]
make_rootfs() {
  local image=$1 suite=$2 packages=$3 customize=${4:-}
  local options=(--variant=minbase --components=main --include="$packages")
  [ -z "$customize" ] || options+=(--customize-hook="$customize")
  # Without a mirror mmdebstrap takes its own default and adds the security archive; LAB_DEBIAN_MIRROR overrides it.
  mmdebstrap "${options[@]}" "$suite" - ${LAB_DEBIAN_MIRROR:+"$LAB_DEBIAN_MIRROR"} 2>"$LAB_CACHE/mmdebstrap.log" \
    | docker import --change 'CMD ["/lib/systemd/systemd"]' - "$image-building" >/dev/null \
    || { docker rmi "$image-building" >/dev/null 2>&1; tail -n 15 "$LAB_CACHE/mmdebstrap.log" >&2; die "mmdebstrap could not build $image; its last lines are above"; }
  finish_image "$image"
}

# The name appears only when the whole rootfs is in it: an import of nothing succeeds too.
finish_image() {
  docker tag "$1-building" "$1"
  docker rmi "$1-building" >/dev/null
}

make_ssh_key() {
  [ -e "$LAB_CACHE/ssh/id_ed25519" ] && return
  mkdir -p -m 0700 "$LAB_CACHE/ssh"
  ssh-keygen -q -t ed25519 -N '' -C metalserve-lab -f "$LAB_CACHE/ssh/id_ed25519"
}
