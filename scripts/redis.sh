#!/usr/bin/env bash
# Makes sure that the programs are there which tests and demos of a shared index start.
#
# Needs redis-server, redis-cli and openssl. What is missing is installed from Debian's packages if
# that is possible (root, apt-get); otherwise this fails and says what to install.
set -euo pipefail

missing() {
    local program
    for program in redis-server redis-cli openssl; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

absent=$(missing)
[[ -z $absent ]] && exit
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "redis: ${absent//$'\n'/, } not found; install Debian's redis-server and openssl" >&2
    exit 1
fi
echo "redis: installing redis-server and openssl from Debian's packages"
export DEBIAN_FRONTEND=noninteractive
# Only the programs are wanted: a service that starts by itself would take the usual port.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -qq -y --no-install-recommends redis-server openssl >/dev/null
absent=$(missing)
if [[ -n $absent ]]; then
    echo "redis: ${absent//$'\n'/, } still not found" >&2
    exit 1
fi
