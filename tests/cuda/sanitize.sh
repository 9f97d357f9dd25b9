#!/usr/bin/env bash
# sanitize.sh DRIVER [options of the driver]: runs exchange_driver as it is, then under each tool of compute-sanitizer,
# and prints a line for each. Ends with 0 if all are ok.
#   OUT=.                 where the logs go, driver-<tool>.log
#   TOOLS="..."           which (default: plain delay memcheck racecheck initcheck synccheck)
#   LIMIT=150             seconds that each may take
#   SANITIZER_FLAGS="..." flags to add
#   COMPUTE_SANITIZER     where it is, if not on PATH
set -uo pipefail

if [[ $# -lt 1 || ! -x $1 ]]; then
  echo "usage: sanitize.sh DRIVER [options of the driver]; got no program that can be run" >&2
  exit 2
fi
driver=$1
shift
out=${OUT:-.}
limit=${LIMIT:-150}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
tool_found=97 # what compute-sanitizer ends with if it found something and the driver did not
mkdir -p "$out"

# Never --force-blocking-launches or --force-synchronization-limit: kernels of several streams wait for each other, so
# they must run at once, as they do by default.
common=(--error-exitcode "$tool_found" --print-limit 20 --target-processes application-only)
read -ra added <<<"${SANITIZER_FLAGS:-}"

failed=0
# check NAME COMMAND...: a command is ok if it ends with 0, all its results were right, and no tool counted an error.
check() {
  local name=$1 log=$out/driver-$1.log code verdict start=$SECONDS
  shift
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
  code=$?
  local results summary
  results=$(grep -E '^[0-9]+ checks, [0-9]+ wrong$' "$log" | tail -1)
  summary=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$log" | tail -1)
  case $code in
    0) verdict=ok ;;
    2) verdict="cannot run" ;;
    124 | 137) verdict="took too long" ;;
    "$tool_found") verdict="found something" ;;
    *) verdict="failed ($code)" ;;
  esac
  if [[ $verdict == ok ]]; then
    [[ $results == *", 0 wrong" ]] || verdict="not all results right"
    # racecheck's warnings are no errors to it, but they are to us.
    [[ -z $summary || $summary == "ERROR SUMMARY: 0 errors"* || $summary == *": 0 hazards displayed"* ]] ||
      verdict="found something"
    [[ $name == plain || $name == delay || -n $summary ]] || verdict="no summary: did the tool run?"
  fi
  [[ $verdict == ok ]] || failed=1
  printf '%-10s %-16s %s; %s; %d s; %s\n' "$name" "$verdict" "${results:-no results}" "${summary:-no tool}" \
    $((SECONDS - start)) "$log"
}

# A kernel waits for its peers longer than usual, as all are slow; `timeout` ends what hangs.
small=("$driver" --quick --timeout "$limit")
for tool in ${TOOLS:-plain delay memcheck racecheck initcheck synccheck}; do
  watch=("$sanitizer" --tool "$tool" "${common[@]}" "${added[@]}")
  case $tool in
    plain) check plain "$driver" "$@" ;;
    delay) check delay "$driver" --delay "$@" ;;
    memcheck)
      # Padding, so that what is beside an array belongs to no other. Twenty cases are each group of the table once.
      watch+=(--leak-check full --padding 256)
      check memcheck "${watch[@]}" "$driver" --cases 20 --timeout "$limit" "$@"
      ;;
    racecheck) check racecheck "${watch[@]}" --racecheck-report analysis "${small[@]}" "$@" ;;
    # What is filled before it is used would count as initialised.
    initcheck) check initcheck "${watch[@]}" "${small[@]}" --uninitialised "$@" ;;
    synccheck) check synccheck "${watch[@]}" "${small[@]}" "$@" ;;
    *)
      echo "sanitize.sh: no such tool: $tool" >&2
      exit 2
      ;;
  esac
done
exit $failed
