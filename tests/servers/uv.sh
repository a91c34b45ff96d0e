#!/bin/sh
# Install uv for this user where it is missing: with pip, which on Debian and Ubuntu is a package of its own.
set -eu

command -v uv >/dev/null 2>&1 || python3 -m uv --version >/dev/null 2>&1 && exit 0

give_up() {
    echo "cannot install uv with pip; on Debian and Ubuntu: apt-get install python3-pip, or see https://docs.astral.sh/uv/"
    exit 1
}
if ! python3 -m pip --version >/dev/null 2>&1; then
    as_root=""
    [ "$(id -u)" = 0 ] || as_root="sudo -n"
    command -v apt-get >/dev/null || give_up
    [ -z "$as_root" ] || $as_root true 2>/dev/null || give_up
    echo "installing python3-pip"
    $as_root apt-get update -qq || give_up
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip >/dev/null || give_up
fi
# The second form is for a Python that the system's packages manage, and that pip leaves alone (PEP 668).
python3 -m pip install --quiet uv 2>/dev/null || python3 -m pip install --quiet --user --break-system-packages uv || give_up
