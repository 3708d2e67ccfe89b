#!/usr/bin/env bash
# Usage: scripts/system.sh PACKAGE...
# Installs Debian packages if this user may (root, or sudo that asks no password). What may not or cannot be installed is
# named and skipped: nothing here is fatal, and ZEROLORA_APT=0 forbids it altogether. In CI (CI=true) what is missing is fatal.
set -uo pipefail

# Two at the same time, of `make -j`: the second waits.
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
# The package lists of a fresh machine or image are empty, those of an old one point at files that are gone.
apt_get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
    { apt_get update && apt_get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
    skip "apt-get failed: $(grep -m1 '^E:' "$log" || tail -n1 "$log")"
