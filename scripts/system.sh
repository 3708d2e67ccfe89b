#!/usr/bin/env bash
# Usage: scripts/system.sh PACKAGE...
# Install Debian packages if this user may (root, or sudo without a password). Packages that cannot be installed are named
# and skipped; only in CI (CI=true) is that fatal. ZEROLORA_APT=0 disables the script.
set -uo pipefail

# Of two concurrent runs (`make -j`) the second waits.
if command -v flock >/dev/null; then exec 8<"$0"; flock 8; fi
missing=()
for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

skip() {
    echo "system packages: ${missing[*]} missing, skipped: $1" >&2
    [ "${CI:-}" != true ] || exit 1
    exit 0
}

command -v apt-get >/dev/null || skip "no apt-get on this machine"
[ "${ZEROLORA_APT:-1}" = 0 ] && skip "ZEROLORA_APT=0"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || skip "neither root nor password-free sudo; sudo apt-get install ${missing[*]}"
    as_root=(sudo -n)
fi

apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@"; }

echo "system packages: installing ${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The package lists of a fresh machine are empty, and those of an old one refer to deleted files.
apt_get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
    { apt_get update && apt_get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
    skip "apt-get failed: $(grep -m1 '^E:' "$log" || tail -n1 "$log")"
