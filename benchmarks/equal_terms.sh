#!/usr/bin/env bash
# Predictions and paths on equal terms: one small network, one optimizer, the same images, steps, batch and seeds; FID of NUM images.
#
#   bash benchmarks/equal_terms.sh DATA REFERENCE WEIGHTS WORK STEPS [METHOD:SEED...]
#   bash benchmarks/equal_terms.sh digits data:digits:held-out "" WORK 1500                     (on a CPU, an hour)
#
# DATA: prepared CIFAR-10. REFERENCE: its moments (mvm data stats). WEIGHTS: of the FID network. STEPS: of each training (2600: 2 minutes
# at 12,000 images/s). METHOD: mvm-u, mvm-v, mvm-x0, flow, vp-eps, vp-v; without any, all six with seed 0, then with 1, then with 2.
# Controls: mvm-u-as-flow, mvm-v-as-flow, mvm-x0-as-flow are those with their error weighted as flow's is: of these and flow the loss is one
# function of x0_hat and lam, and only what the network puts out (and on what path it looks) differs.
# mvm-u-unit, flow-unit (and mvm-u-unit-as-flow): on pixels twice as large, of std 1 on photographs, under the same law of noise on images.
# DATA may be `digits`, the set in the package: its recipe's network and rate, and the Frechet distance of pixels of 1,000 images.
# Equal terms are an equal law of log-SNR: lam ~ N(0.5, 1.5^2) for every path, whatever t that is there, and the plain square error of
# the method's own target. In x0 at equal lam all losses are weights of lam times one error, so methods differ by that weight, by what
# the network puts out, by the scale of what it is given, and by the path the sampler knows. Literature's uniform t would be another law of lam on each path.
# SETTING="RECIPE [OPTION VALUE]...": another recipe than cifar10-small, with its own law of log-SNR. In latents of variance 1:
#   SETTING="imagenette-ddt-clip --codec.path RAE" bash benchmarks/equal_terms.sh DATA REFERENCE WEIGHTS WORK STEPS {mvm-u,mvm-u-as-flow,flow,mvm-x0-as-flow,vp-v}:{0,1,2}
# One rate serves all (1e-3; digits 2e-3); it was tuned for none. EXTRA="--train.lr 4e-3" is far better for u and flow.
# Muon and Adam do not feel the scale of a loss, clipping at norm 1 does.
# WORK/METHOD-SEED.json: figures of a finished one, which is skipped; one that was stopped goes on. PACK=FILE.tgz: those files, packed.
# STREAMS=2: two runs at a time, each of a method of its own (seeds after the first need their method's seed 0); several calls may share a WORK so.
# OVERLAP=1: a run is judged while the next one is trained. With either, starts and compilations cost less, but seconds and images/s are of
# programs that share the machine. One run is judged at a time, whatever the streams: the FID network takes 28 GB for a batch of 1,000.
# UNTIL=SECONDS: no training is begun later than that after the start, on a machine lent for a while; call again with the same WORK.
# EXTRA: more options of training. FAST: options of speed of sampling (empty on a CPU). NUM, BATCH: images judged, and at a time.
set -euo pipefail
data=$1 reference=$2 inception=$3 work=$4 steps=$5
shift 5
here=$(dirname "$0")
mkdir -p "$work"
law="--path.law.name lam-normal --path.law.mean 0.5 --path.law.std 1.5"
if [ -n "${SETTING:-}" ]; then
  read -ra setting <<< "$SETTING --data.path $data" && law="" num=${NUM:-2000} fast=${FAST---precision bf16 --compile}
elif [ "$data" = digits ]; then
  setting=(digits) num=${NUM:-1000} fast=${FAST-}
else
  # the network, optimizer and rate of the model that ships, without alignment; averages of 2,000 steps reach back 200 whatever their decay
  setting=(cifar10-small --data.path "$data" --train.lr 1e-3 --train.warmup 200 --train.ema 0.998 --train.power= --repa.encoder=
    --objective.weight none)
  num=${NUM:-10000} fast=${FAST---precision bf16 --compile}
fi
kept="--train.save_every 1000 --train.keep 1 --train.snapshot_every 0 --train.keep_best false --preview.every 0 --train.log_every 10"

options() {  # options METHOD: its path, and what the network predicts
  case $1 in
    mvm-*-as-flow) options "${1%-as-flow}" && echo "--objective.weight flow" ;;
    mvm-u-unit | flow-unit) options "${1%-unit}" && echo "--codec.scale 2 --path.law.mean -0.1931471806" ;;  # 0.5 - log(2)
    mvm-u) echo "--path.schedule mean-velocity --objective.kind u" ;;
    mvm-v) echo "--path.schedule mean-velocity --objective.kind v" ;;  # u / sqrt(t): the velocity as it is, unscaled
    mvm-x0) echo "--path.schedule mean-velocity --objective.kind x0" ;;
    flow) echo "--path.schedule linear-flow --objective.kind flow" ;;
    vp-eps) echo "--path.schedule variance-preserving --objective.kind eps" ;;
    vp-v) echo "--path.schedule variance-preserving --objective.kind diffusion_v" ;;
    *) echo "unknown method '$1'" >&2; return 2 ;;
  esac
}

pack() {
  [ -n "${PACK:-}" ] || return 0
  # figures and logs; trainings are too large to take along. 1: a file changed meanwhile (another call works in this folder)
  local new=$PACK.$$
  find "$work" -maxdepth 2 ! -name '.*' \( -name '*.json*' -o -name '*.md' -o -name '*.png' -o -name '*.log' \) -printf '%P\0' \
    | tar czf "$new" -C "$work" --ignore-failed-read --null -T - || [ $? -eq 1 ]
  mv "$new" "$PACK"
}

judged() {  # judged METHOD SEED SECONDS: FID of a trained run; SECONDS are those of its training
  local name=$1-$2
  SECONDS=0
  # shellcheck disable=SC2086
  if python3 "$here/equal_terms.py" judge "$work" "$1" "$2" --ref "$reference" --inception "$inception" --num "$num" \
    --batch "${BATCH:-1000}" $fast --trained "$3" > "$work/$name-judge.log" 2>&1; then
    echo "$name: trained in $3 s, judged in $SECONDS s"
    pack
  else
    echo "$name: judging failed, see $work/$name-judge.log"
  fi
}

[ $# -gt 0 ] || set -- {mvm-u,mvm-v,mvm-x0,flow,vp-eps,vp-v}:{0,1,2}
# seeds outside: after a third of the time there is one run of everything
mapfile -t asked < <(printf '%s\n' "$@" | sort -s -t: -k2,2n)
[[ ${STREAMS:-1} =~ ^[1-9][0-9]*$ ]] || { echo "STREAMS='$STREAMS' must be a whole number from 1 on" >&2; exit 2; }
[[ ${UNTIL:-0} =~ ^[0-9]+$ ]] || { echo "UNTIL='$UNTIL' must be whole seconds" >&2; exit 2; }
export BEGUN=${BEGUN:-$(date +%s)}  # streams are calls of this program, and share its start
for pair in "${asked[@]}"; do
  options "${pair%%:*}" > /dev/null  # an unknown one ends this before anything is trained
done

write_table() {
  python3 "$here/equal_terms.py" table "$work" | tee "$work/equal-terms.md"
  pack
}

if [ "${STREAMS:-1}" -gt 1 ]; then
  mapfile -t methods < <(printf '%s\n' "${asked[@]%%:*}" | awk '!seen[$0]++')
  for ((stream = 0; stream < STREAMS; stream++)); do
    mine=()
    for ((i = stream; i < ${#methods[@]}; i += STREAMS)); do
      for pair in "${asked[@]}"; do
        [ "${pair%%:*}" != "${methods[i]}" ] || mine+=("$pair")
      done
    done
    # without any pair a call would run them all
    [ ${#mine[@]} -eq 0 ] || STREAMS=1 bash "$0" "$data" "$reference" "$inception" "$work" "$steps" "${mine[@]}" | grep -v '^|' &
  done
  wait
  write_table
  exit
fi
for pair in "${asked[@]}"; do
  method=${pair%%:*} seed=${pair##*:} name=${pair/:/-}
  if [ -f "$work/$name.json" ]; then
    grep -q "\"steps\": $steps," "$work/$name.json" || { echo "$work/$name.json is of another number of steps than $steps; give another WORK" >&2; exit 2; }
    echo "$name: finished before"
    continue
  fi
  if [ -n "${UNTIL:-}" ] && [ $(($(date +%s) - BEGUN)) -ge "$UNTIL" ]; then
    echo "$name: not begun, $UNTIL s are over"
    continue
  fi
  chosen=$(options "$method")
  SECONDS=0
  # shellcheck disable=SC2086
  if ! python3 -m mvm train "${setting[@]}" --seed "$seed" --train.steps "$steps" $law $kept $chosen ${EXTRA:-} --auto-resume --out "$work/$name" \
    > "$work/$name.log" 2>&1; then
    echo "$name: training failed, see $work/$name.log"
    continue
  fi
  # of the call that finished it: one whose judging failed is called again, and has nothing left to train
  [ -f "$work/$name/seconds" ] || echo "$SECONDS" > "$work/$name/seconds"
  trained=$(cat "$work/$name/seconds")
  wait  # for the one judged before
  judged "$method" "$seed" "$trained" &
  [ -n "${OVERLAP:-}" ] || wait
done
wait
write_table
