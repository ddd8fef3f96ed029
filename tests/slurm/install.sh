#!/usr/bin/env bash
# Installs what `make test-cluster` needs, Chromium for the tests of the page, and fish and zsh, with apt-get; does nothing where it is there.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

stop() {
    echo "make test-cluster: $1" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || stop "it makes machines out of Linux namespaces and must run as root: sudo make test-cluster"
unshare --net --uts --ipc --mount --pid --fork true ||
    stop "this machine allows no new namespaces; a container has to be started with --privileged"

declare -A package_of=(
    [slurmctld]=slurm-wlm [slurmd]=slurm-wlm [sbatch]=slurm-wlm [munged]=munge [sshd]=openssh-server
    [ssh]=openssh-client [pdsh]=pdsh [ip]=iproute2 [ps]=procps [strace]=strace [chromium]=chromium [fish]=fish [zsh]=zsh
)
missing=""
for program in "${!package_of[@]}"; do
    command -v "$program" >/dev/null || missing+=" ${package_of[$program]}"
done
[ -n "$missing" ] || exit 0

command -v apt-get >/dev/null || stop "missing:$missing; there is no apt-get here, so install them by hand"
echo "make test-cluster: installing$missing"
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then # so that no daemon is started on this machine itself
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # words
apt-get install -y -qq --no-install-recommends $missing >/dev/null
