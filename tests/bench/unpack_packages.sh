# Packages for a GPU machine without registry access: unpack them under /tmp and let this shell's commands find them.
# . tests/bench/unpack_packages.sh SITE.tgz [PEERS.tgz]
# SITE.tgz holds unpacked wheels, which include their commands (zerolora starts `deepspeed` by name); PEERS.tgz
# is that of pack_peers.sh, which gpu_performance.sh shows to Unsloth alone. PYTHON (default python3) runs the commands.
mkdir -p /tmp/site /tmp/peers
tar xzf "$1" -C /tmp/site
export PYTHONPATH=/tmp/site
if [ -n "${2:-}" ]; then
  tar xzf "$2" -C /tmp/peers
  export PEERS=/tmp/peers
fi
mkdir -p /tmp/site/bin
for script in /tmp/site/*.data/scripts/*; do
  # As an installer does it: wheels say `#!python`.
  sed "1s|^#!python.*|#!$(command -v "${PYTHON:-python3}")|" "$script" > "/tmp/site/bin/${script##*/}"
done
chmod +x /tmp/site/bin/*
export PATH=/tmp/site/bin:$PATH
