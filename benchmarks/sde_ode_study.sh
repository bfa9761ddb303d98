#!/usr/bin/env bash
# The paper's comparison of SDE and ODE (section 4.2) with one model of ours: the same weights, seeds, labels, grid rule, orders P3/C4 and
# guidance; NFE 13 to 65, rho 0, 0.75 and 1, by `adams-power` and by the paper's SA-Solver (`sa`), which is given the t_min that suits it best.
#
#   bash benchmarks/sde_ode_study.sh MODEL REFERENCE WEIGHTS WORK PART...
#
# MODEL: a run, or a shipped model (cifar10). REFERENCE: moments of the training images (mvm data stats). WEIGHTS: of the FID network.
# PART, in this order, in one call or in several:
#   tmin        sa at several t_min, few images, on seeds of their own: chooses t_min for grid-sa and table-sa (TMIN=1e-4 skips the choice)
#   grid-adams  30 cells of NUM images: 5 NFE x 3 rho x without and with guidance 1.2 on [0.6, 0.8]
#   grid-sa     the same by sa
#   guidance    16 cells of NUM images: scales and intervals, adams-power, ODE, NFE 26; SCALES and INTERVALS add others to the same folder
#   table       the four rows of the paper's Table 1 at NFE 65, MANY images, by adams-power; table-sa: by sa
#   best        the best cell of grid-adams, grid-sa and guidance, as far as they are there, with MANY images
#   figures     tables and curves of what is there: WORK/*.md, WORK/*.png
# Each part is a sweep in WORK/PART: a part that was stopped goes on with the cells that are missing. t_min and the best cell are chosen
# on other images than those that are judged in the end. PACK=FILE.tgz: the figures so far, packed after every part and at a stop.
# Sizes: NUM MANY FEW BATCH JACKKNIFE; METRICS; FAST: options of speed (empty on a CPU); NFES RHOS TMINS SCALES,
# and INTERVALS, with blanks between them.
set -euo pipefail
model=$1 reference=$2 inception=$3 work=$4
shift 4
here=$(dirname "$0")
many=${MANY:-50000} num=${NUM:-10000} few=${FEW:-5000}
nfes=${NFES:-13,26,39,52,65} rhos=${RHOS:-0,0.75,1}
later=1000000  # first seed of the images that choices are made on; the final ones begin at 2,000,000
paper="--cfg 1,1.2 --interval 0.6,0.8"
mkdir -p "$work"

pack() {
  [ -n "${PACK:-}" ] || return 0
  # kept: what goes on and what is quoted; 1: a file changed meanwhile (another part runs beside this one)
  local new=$PACK.$$
  tar czf "$new" -C "$work" --exclude=work --exclude=report.html --exclude='cells/*.png' . || [ $? -eq 1 ]
  mv "$new" "$PACK"
}
trap pack EXIT

swept() {  # swept PART OPTIONS: one sweep in a folder of its own
  local part=$1
  shift
  # shellcheck disable=SC2086
  python3 -m mvm sweep "$model" --ref "$reference" --inception "$inception" --metrics "${METRICS:-fid}" --batch "${BATCH:-1000}" \
    ${FAST---precision bf16 --compile} --out "$work/$part" "$@"
}

chosen() {  # the t_min of sa
  [ -n "${TMIN:-}" ] && echo "$TMIN" || python3 "$here/study_figures.py" tmin "$work/tmin"
}

there() {  # there PART...: those of the folders that are finished
  for part in "$@"; do
    [ ! -f "$work/$part/results.csv" ] || echo "$work/$part"
  done
}

figures() {
  local grids guided judged
  grids=$(there grid-adams grid-sa) guided=$(there guidance) judged=$(there table table-sa best)
  # shellcheck disable=SC2086
  {
    [ -z "$grids" ] || python3 "$here/figures.py" --only cifar10-fid-nfe --of $grids --out "$work"
    [ -z "$grids" ] || python3 "$here/study_figures.py" table $grids > "$work/grid.md"
    [ -z "$grids" ] || python3 "$here/study_figures.py" differences $grids > "$work/differences.md"
    [ -z "$guided" ] || python3 "$here/figures.py" --only cifar10-guidance --of $guided --out "$work"
    [ -z "$guided" ] || python3 "$here/study_figures.py" table $guided > "$work/guidance.md"
    [ -z "$judged" ] || python3 "$here/study_figures.py" table $judged | tee "$work/table.md"
  }
}

study() {  # study PART
  local errors="--jackknife ${JACKKNIFE:-20}" t_min options
  # shellcheck disable=SC2086
  case $1 in
    tmin) swept tmin --num "$few" --seed $later --solvers sa --t-min "${TMINS:-1e-2,3e-3,1e-3,3e-4,1e-4}" --nfe 13,39 --rho 0,0.75 ;;
    grid-adams) swept grid-adams --num "$num" $errors --solvers adams-power --nfe "$nfes" --rho "$rhos" $paper ;;
    grid-sa)
      t_min=$(chosen)
      swept grid-sa --num "$num" $errors --solvers sa --t-min "$t_min" --nfe "$nfes" --rho "$rhos" $paper ;;
    guidance)
      options=$(printf -- ' --interval %s' ${INTERVALS:-0.6,0.8 0.3,0.9 0,1})
      swept guidance --num "$num" $errors --solvers adams-power --nfe 26 --rho 0 --cfg "${SCALES:-1,1.2,1.5,2,2.5,3}" $options ;;
    table) swept table --num "$many" --seed $((2 * later)) $errors --solvers adams-power --nfe 65 --rho 0,0.75 $paper ;;
    table-sa)
      t_min=$(chosen)
      swept table-sa --num "$many" --seed $((2 * later)) $errors --solvers sa --t-min "$t_min" --nfe 65 --rho 0,0.75 $paper ;;
    best)
      # shellcheck disable=SC2046
      options=$(python3 "$here/study_figures.py" best $(there grid-adams grid-sa guidance))
      swept best --num "$many" --seed $((2 * later)) $errors $options ;;
    figures) figures ;;
    *) echo "unknown part '$1'" >&2; exit 2 ;;
  esac
}

for part in "$@"; do
  SECONDS=0
  study "$part"
  echo "part $part: $SECONDS s"
  pack
done
