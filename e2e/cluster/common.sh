# Sourced by the scripts in this folder: names, versions, paths and helper functions.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

CLUSTER=stoker-e2e
KIND_VERSION=v0.33.0       # the last version that is known to run on cgroup v1
KUBERNETES_VERSION=v1.37.0 # supported by this kind, and built by kube/go.mod
DEBIAN=bookworm
PYTHON_IMAGE=python:3.12-slim # base of the project's images

# Folder of everything that is built, outside the checkout. Each name contains the version or a hash of the sources: an
# artifact is built once per machine, and rebuilt when its sources change.
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}/e2e
BIN=$CACHE/bin
mkdir -p "$BIN" "$CACHE/log" "$CACHE/lock"
export PATH=$BIN:$PATH

# hash_of FILE...: prints twelve hex digits of a hash of the files' content.
hash_of() { cat -- "$@" | sha256sum | cut -c1-12; }

KUBE_SOURCES=$(hash_of "$HERE"/kube/*.* "$HERE"/kube/*/*)
TOOLS=$BIN/tools-$(hash_of "$HERE"/tools/*/*.go)
CLUSTER_KUBECONFIG=$CACHE/kubeconfig

# The private Docker (see own-docker).
OWN_DOCKER=unix://$CACHE/docker.sock
OWN_DOCKER_DATA=$CACHE/docker
OWN_DOCKER_HOST_IP=169.254.97.1 # a link-local /30 that no route of the machine uses
OWN_DOCKER_IP=169.254.97.2
DOCKER_PROGRAMS=$CACHE/docker-programs

# Progress is written to stderr, results (a path, an export line) to stdout.
say() { printf 'e2e: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# locked NAME COMMAND...: runs COMMAND while it holds a lock of this machine; other callers wait.
locked() {
  local name=$1
  shift
  (
    flock 9
    "$@"
  ) 9>"$CACHE/lock/$name"
}

# once NAME PATH COMMAND...: unless PATH exists, runs COMMAND, which creates $out, and renames that to PATH if COMMAND
# succeeds. An interrupted run leaves PATH.part, which the next run deletes.
# Never call it in a condition: bash would then ignore a failing line inside COMMAND.
once() {
  [ -e "$2" ] || locked "$1" make_missing "$@"
}
make_missing() {
  local name=$1 path=$2 out=$2.part
  shift 2
  [ ! -e "$path" ] || return 0 # another process made it while this one waited for the lock
  rm -rf "$out"
  timed "$name" "$@"
  mv -T "$out" "$path"
}

# timed NAME COMMAND...: runs COMMAND with its output in a log; prints its duration or, if it fails, the end of the log.
timed() (
  name=$1 started=$SECONDS log=$CACHE/log/$1.log
  shift
  say "$name ..."
  exec 7>&2 # in the trap stderr may still be the log
  trap 'tail -n 20 "$log" >&7; say "$name failed; full log: $log" 2>&7' EXIT
  "$@" >"$log" 2>&1 9>&-
  trap - EXIT
  times >"$log.times" # not in a pipe, where it would report another shell's times
  say "$name: $((SECONDS - started)) s, $(children_cpu_seconds "$log.times") CPU s"
)
# children_cpu_seconds FILE: prints the CPU seconds of ended children (not of containers) from the output of `times`.
children_cpu_seconds() {
  awk 'NR == 2 { split($1 $2, part, /[ms]/); printf "%d\n", 60 * (part[1] + part[3]) + part[2] + part[4] }' "$1"
}

# apt_install PACKAGE...: installs the missing ones.
apt_install() {
  local package missing=()
  for package; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] || timed apt apt_get_install "${missing[@]}"
}
apt_get_install() {
  command -v apt-get >/dev/null || { echo "this machine has no apt-get; install these packages: $*"; exit 1; }
  [ "$(id -u)" = 0 ] || { echo "packages are missing; run as root: apt-get install $*"; exit 1; }
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

# use_docker: selects this machine's Docker if it has or can pull images, otherwise the private one. Sets $docker_is.
use_docker() {
  docker_is=theirs
  if own_docker_alive || ! docker_answers || ! has_or_pulls "$PYTHON_IMAGE"; then use_own_docker; fi
}
use_own_docker() {
  docker_is=ours
  [ "$(id -u)" = 0 ] || die "found no Docker that has or can pull images; a private one requires root"
  "$HERE/build" docker tools >/dev/null
  locked own-docker "$HERE/own-docker" start
  export DOCKER_HOST=$OWN_DOCKER DOCKER_CONFIG=$CACHE/docker-config PATH=$DOCKER_PROGRAMS/usr/bin:$PATH
}
docker_answers() { timeout 10 docker version >/dev/null 2>&1; }
own_docker_alive() { curl -sf -m 5 --unix-socket "${OWN_DOCKER#unix://}" http://docker/_ping >/dev/null 2>&1; }
has_or_pulls() {
  docker image inspect "$1" >/dev/null 2>&1 || timeout 300 docker pull "$1" >"$CACHE/log/pull.log" 2>&1
}

# kind labels its containers, so that incomplete clusters are found, too. The network is used by this cluster only;
# kind's default network is shared with other clusters.
export KIND_EXPERIMENTAL_DOCKER_NETWORK=$CLUSTER
remove_cluster() {
  docker ps -aq --filter "label=io.x-k8s.kind.cluster=$CLUSTER" | xargs -r docker rm --force --volumes >/dev/null
  docker network rm "$CLUSTER" >/dev/null 2>&1 || true
}
