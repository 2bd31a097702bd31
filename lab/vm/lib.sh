# Shared by the scripts of the VM: the image that is its root file system and, with its compiler, the packages' workshop.
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
VM_CACHE=$LAB_CACHE/vm
VM_IMAGE=metalserve-lab/vm:$(inputs_hash lab/vm/packages)

build_vm_image() {
  image_exists "$VM_IMAGE" && return
  say "building the VM's root file system (Debian 13 with its kernel, headers and compiler)"
  make_rootfs "$VM_IMAGE" trixie "$(cat "$LAB_DIR/vm/packages")"
}
