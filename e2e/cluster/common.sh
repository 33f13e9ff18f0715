# Sourced by the scripts in this folder: names and versions, where things are kept, and a few helpers.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

CLUSTER=stoker-e2e
KIND_VERSION=v0.33.0       # the last one known to run on cgroup v1
KUBERNETES_VERSION=v1.37.0 # what this kind is made for, and what kube/go.mod builds
DEBIAN=bookworm
PYTHON_IMAGE=python:3.12-slim # what the project's own images are built on

# Everything that is made lies here, outside the checkout, each piece under a name that holds its version or
# the hash of its sources: a piece is made once a machine, and an edited source never meets an old binary.
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}/e2e
BIN=$CACHE/bin
mkdir -p "$BIN" "$CACHE/log" "$CACHE/lock"
export PATH=$BIN:$PATH

# hash_of FILE...: twelve hex digits that name the content of these files.
hash_of() { cat -- "$@" | sha256sum | cut -c1-12; }

KUBE_SOURCES=$(hash_of "$HERE"/kube/*.* "$HERE"/kube/*/*)
TOOLS=$BIN/tools-$(hash_of "$HERE"/tools/*/*.go)
CLUSTER_KUBECONFIG=$CACHE/kubeconfig

# Our own Docker (see own-docker).
OWN_DOCKER=unix://$CACHE/docker.sock
OWN_DOCKER_DATA=$CACHE/docker
OWN_DOCKER_HOST_IP=169.254.97.1 # a link-local /30, where no route of the machine's leads
OWN_DOCKER_IP=169.254.97.2
DOCKER_PROGRAMS=$CACHE/docker-programs

# Progress goes to stderr; stdout is for results (a path, an export line).
say() { printf 'e2e: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# locked NAME COMMAND...: one at a time on this machine; a second caller waits for the first.
locked() {
  local name=$1
  shift
  (
    flock 9
    "$@"
  ) 9>"$CACHE/lock/$name"
}

# once NAME PATH COMMAND...: unless PATH exists, COMMAND makes it at $out, renamed to PATH when all went well.
# Interrupted work leaves a .part that the next run throws away.
# Never call it in a condition: bash would then ignore a failing line inside COMMAND.
once() {
  [ -e "$2" ] || locked "$1" make_missing "$@"
}
make_missing() {
  local name=$1 path=$2 out=$2.part
  shift 2
  [ ! -e "$path" ] || return 0 # made while we waited
  rm -rf "$out"
  timed "$name" "$@"
  mv -T "$out" "$path"
}

# timed NAME COMMAND...: COMMAND with its output in a log, one line for a person, and the log's end if it fails.
timed() (
  name=$1 started=$SECONDS log=$CACHE/log/$1.log
  shift
  say "$name ..."
  exec 7>&2 # in the trap stderr may still be the log
  trap 'tail -n 20 "$log" >&7; say "$name failed; the whole log: $log" 2>&7' EXIT
  "$@" >"$log" 2>&1 9>&-
  trap - EXIT
  times >"$log.times" # not in a pipe, where it would be another shell's
  say "$name: $((SECONDS - started)) s, $(children_cpu_seconds "$log.times") CPU s"
)
# children_cpu_seconds FILE: of what `times` wrote, those of children that have ended; what containers compute is not in it.
children_cpu_seconds() {
  awk 'NR == 2 { split($1 $2, part, /[ms]/); printf "%d\n", 60 * (part[1] + part[3]) + part[2] + part[4] }' "$1"
}

# apt_install PACKAGE...: those that are missing.
apt_install() {
  local package missing=()
  for package; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] || timed apt apt_get_install "${missing[@]}"
}
apt_get_install() {
  command -v apt-get >/dev/null || { echo "needed, and there is no apt-get to install it: $*"; exit 1; }
  [ "$(id -u)" = 0 ] || { echo "as root: apt-get install $*"; exit 1; }
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

# use_docker: the Docker that runs here if it has or can pull images, else our own. $docker_is says which.
use_docker() {
  docker_is=theirs
  if own_docker_alive || ! docker_answers || ! has_or_pulls "$PYTHON_IMAGE"; then use_own_docker; fi
}
use_own_docker() {
  docker_is=ours
  [ "$(id -u)" = 0 ] || die "no Docker here that has or can pull images, and running our own needs root"
  "$HERE/build" docker tools >/dev/null
  locked own-docker "$HERE/own-docker" start
  export DOCKER_HOST=$OWN_DOCKER DOCKER_CONFIG=$CACHE/docker-config PATH=$DOCKER_PROGRAMS/usr/bin:$PATH
}
docker_answers() { timeout 10 docker version >/dev/null 2>&1; }
own_docker_alive() { curl -sf -m 5 --unix-socket "${OWN_DOCKER#unix://}" http://docker/_ping >/dev/null 2>&1; }
has_or_pulls() {
  docker image inspect "$1" >/dev/null 2>&1 || timeout 300 docker pull "$1" >"$CACHE/log/pull.log" 2>&1
}

# kind labels what it makes; by the label even a half-made cluster is found. The network is ours alone: kind's default
# one is shared with other clusters.
export KIND_EXPERIMENTAL_DOCKER_NETWORK=$CLUSTER
remove_cluster() {
  docker ps -aq --filter "label=io.x-k8s.kind.cluster=$CLUSTER" | xargs -r docker rm --force --volumes >/dev/null
  docker network rm "$CLUSTER" >/dev/null 2>&1 || true
}
