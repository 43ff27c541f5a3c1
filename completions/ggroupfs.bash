# Completion of ggroupfs for bash: source it, or install it as .../bash-completion/completions/ggroupfs.
# shellcheck shell=bash
#
# What is offered for each command is a table, which tests/t0_text/t0_completions.py holds against the command itself.

_ggroupfs_mounts=/proc/self/mounts

_ggroupfs_commands="mount umount upgrade run show top set doctor cdi account metrics node policy balance
    replay tenant demo"

declare -A _ggroupfs_options=(
    [mount]="-f --foreground --gpu --ledger -o"
    [umount]="-f --force"
    [upgrade]="--force"
    [run]="--mount -p --slice --gpu"
    [show]="--tree --json --mount"
    [top]="-a --all -c --command -d --delay --once --json --mount"
    [set]="--reset --gpu --timeout --mount"
    [doctor]="--json --thaw-all --journal --mount"
    [cdi]="--output --hook --mount"
    [account]="--format --sort --gpu --mount"
    [node]="--mount --format"
    [metrics]="--mount --no-processes --labels --listen --textfile"
    [policy]="--config --mount"
    [balance]="--config --mount"
    [replay]="--policy --order --lanes --set --capacity --json --plot --generate --nodes --place --seed --jobs"
    [tenant]="--mount --gpu --gmem --kernel --contexts --depth --touch --report --seconds"
    [demo]="--mount --gpu"
)

_ggroupfs_mount_options="gpu= ledger= poll nopoll selftest noselftest deadline= socket= also= journal= nojournal
    scheduler= hold= turns= turns.wait= units= units.wait= slices.d= usher= bus= soft.gpus= soft.gmem= soft.switch=
    soft.faults= ro debug auto_unmount"

# settings: all
_ggroupfs_settings="
    gmem.limit.high=
    gmem.limit.low=
    gmem.swap.max=
    compute.timeslice=
    compute.freeze=
    compute.priority=
    compute.weight=
    compute.max=
    gmem.limit.max=
    gmem.oom.group=
    compute.wait.max=
    compute.spatial=
    compute.sm.max=
    GMemHigh=
    GMemLow=
    GMemSwapMax=
    ComputeTimeSlice=
    ComputePriority=
    ComputeWeight=
    ComputeQuota=
    GMemOOMGroup=
    ComputeWaitMax=
    ComputeSpatial=
    ComputeSMMax=
    GMemMax=
    ComputeFreeze=
"
_ggroupfs_words_of_settings="
    gmem.limit.high=max
    gmem.limit.low=max
    gmem.swap.max=max
    compute.timeslice=default
    compute.freeze=0
    compute.freeze=1
    compute.max=max
    gmem.limit.max=max
    gmem.oom.group=0
    gmem.oom.group=1
    compute.wait.max=default
    compute.spatial=0
    compute.spatial=1
    compute.sm.max=max
    GMemHigh=infinity
    GMemLow=infinity
    GMemSwapMax=infinity
    ComputeQuota=infinity
    GMemOOMGroup=yes
    GMemOOMGroup=no
    ComputeSpatial=yes
    ComputeSpatial=no
    ComputeSMMax=infinity
    GMemMax=infinity
    ComputeFreeze=yes
    ComputeFreeze=no
"
# settings: end

# The words to choose from, of which those that begin with the current one are offered. Bash sees "a=b" as three words
# and replaces the last of them only, so what is before it is cut off.
_ggroupfs_offer() {
    local whole=$1 word
    shift
    for word in "$@"; do
        [[ $word == "$whole"* ]] || continue
        [[ $word == *= || $word == */ ]] && compopt -o nospace 2>/dev/null
        case $whole in
            *=*) [[ $COMP_WORDBREAKS == *=* ]] && word=${word#"${whole%"${whole##*=}"}"} ;;
        esac
        COMPREPLY+=("$word")
    done
}

# One option of a comma-separated list: the list before it stays.
_ggroupfs_offer_in_list() {
    local whole=$1 before=
    [[ $whole == *,* ]] && before=${whole%,*},
    local -a words=()
    local word
    for word in $_ggroupfs_mount_options; do
        words+=("$before$word")
    done
    for word in auto soft nvidia; do words+=("${before}gpu=$word"); done
    for word in auto soft kmod; do words+=("${before}ledger=$word"); done
    for word in auto no; do words+=("${before}units=$word"); done
    for word in on off; do words+=("${before}scheduler=$word"); done
    for word in on off; do words+=("${before}turns=$word"); done
    _ggroupfs_offer "$whole" "${words[@]}"
}

_ggroupfs_settings_of() {
    local -a words=()
    read -ra words -d '' <<<"$_ggroupfs_settings
        gmem.peak= gmem.swap.peak= gmem.reclaim= compute.migrate= $_ggroupfs_words_of_settings"
    _ggroupfs_offer "$1" "${words[@]}"
}

# What `set --reset` takes: settings, which have a default.
_ggroupfs_resettable() {
    local -a words=()
    read -ra words -d '' <<<"$_ggroupfs_settings"
    _ggroupfs_offer "$1" "${words[@]%=}"
}

# What `set` is for: processes of the tree by pid, slices by path, and cgroups that have no slice yet.
_ggroupfs_processes() {
    local mount=$1 whole=$2 path
    local -a words=()
    for path in "$mount"/[0-9]*/; do
        [[ -d $path ]] && path=${path%/} && words+=("${path##*/}")
    done
    _ggroupfs_offer "$whole" "${words[@]}"
}

_ggroupfs_groups() {
    local mount=$1 whole=$2 path top kind
    local -a words=() tops=("$mount/slice")
    local -A seen=()
    _ggroupfs_processes "$mount" "$whole"
    while read -r _ top kind _; do
        [[ $kind == cgroup2 ]] && tops+=("$top")
    done <"$_ggroupfs_mounts"
    for top in "${tops[@]}"; do
        for path in "$top/$whole"*/; do
            path=${path#"$top/"} path=${path%/}
            [[ -d $top/$path && ! $path =~ (^|/)[0-9]+$ ]] || continue
            seen[$path]=1
            compgen -G "$top/$path/*[!0-9]*/" >/dev/null && seen[$path/]=1 # there are slices in it
        done
    done
    words=("${!seen[@]}")
    _ggroupfs_offer "$whole" "${words[@]}"
}

_ggroupfs_slices() {
    local mount=$1 whole=$2 path
    local -a words=()
    for path in "$mount/slice/$whole"*/; do
        path=${path#"$mount/slice/"} path=${path%/}
        [[ -d $mount/slice/$path && ! $path =~ (^|/)[0-9]+$ ]] || continue
        words+=("$path")
        compgen -G "$mount/slice/$path/*[!0-9]*/" >/dev/null && words+=("$path/") # there are slices in it
    done
    _ggroupfs_offer "$whole" "${words[@]}"
}

_ggroupfs_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen "$1" -- "$2")
}

_ggroupfs() {
    COMPREPLY=()
    local IFS=$' \t\n' line=${COMP_LINE:0:COMP_POINT}
    local -a words=()
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last=$((${#words[@]} - 1)) command="" mount=/run/ggroup reset="" index
    local whole=${words[last]} previous=${words[last - 1]}

    for ((index = 1; index < last; index++)); do
        case ${words[index]} in
            --mount) mount=${words[index + 1]} ;;
            --mount=*) mount=${words[index]#--mount=} ;;
            --reset) reset=yes ;;
            --)
                if [[ $command == run ]]; then
                    if ((index == last - 1)); then _ggroupfs_files -c "$whole"; else _ggroupfs_files -f "$whole"; fi
                    return
                fi
                ;;
            -*) ;;
            *) [[ -z $command ]] && command=${words[index]} ;;
        esac
    done
    mount=${mount%/}

    if [[ -z $command ]]; then
        # shellcheck disable=SC2086 # words
        _ggroupfs_offer "$whole" $_ggroupfs_commands -v --verbose --version -h --help
        return
    fi
    case $command,$previous in
        mount,-o) _ggroupfs_offer_in_list "$whole" ;;
        mount,--gpu | demo,--gpu) _ggroupfs_offer "$whole" auto soft nvidia ;;
        mount,--ledger) _ggroupfs_offer "$whole" auto soft kmod ;;
        run,-p) _ggroupfs_settings_of "$whole" ;;
        *,--gpu)
            local -a gpus=()
            for index in "$mount"/gpus/[0-9]*; do [[ -d $index ]] && gpus+=("${index##*/}"); done
            _ggroupfs_offer "$whole" "${gpus[@]}"
            ;;
        *,--mount) _ggroupfs_files -d "$whole" ;;
        metrics,--textfile | doctor,--journal | cdi,--output | cdi,--hook) _ggroupfs_files -f "$whole" ;;
        policy,policy) _ggroupfs_offer "$whole" balance cooperative dynamic lanes slo --config --mount -h --help ;;
        policy,--config | balance,--config) _ggroupfs_files -f "$whole" ;;
        replay,--policy) _ggroupfs_offer "$whole" lanes turns ;;
        replay,--order) _ggroupfs_offer "$whole" fifo srtf pack fair ;;
        replay,--plot) _ggroupfs_files -d "$whole" ;;
        replay,--generate) _ggroupfs_offer "$whole" salus day cluster superres_128 resnet50_50 ;;
        replay,--place) _ggroupfs_offer "$whole" whole mig fractions shares memory ;;
        replay,--nodes | replay,--lanes | replay,--set | replay,--capacity | replay,--seed | replay,--jobs) ;;
        node,--format) _ggroupfs_offer "$whole" json ray dask condor ;;
        metrics,--listen) _ggroupfs_offer "$whole" 127.0.0.1:9740 '[::1]:9740' ;;
        account,--format) _ggroupfs_offer "$whole" text csv json ;;
        account,--sort) _ggroupfs_offer "$whole" busy gpu memory peak name ;;
        metrics,--labels) _ggroupfs_offer "$whole" job step pod container unit user none ;;
        run,--slice) ;;
        set,--timeout) _ggroupfs_offer "$whole" 10min 1h infinity ;;
        tenant,-* | top,-d | top,--delay) ;;
        *)
            if [[ $whole == -* ]]; then
                # shellcheck disable=SC2086 # words
                _ggroupfs_offer "$whole" ${_ggroupfs_options[$command]} -h --help
                [[ $command == run ]] && _ggroupfs_offer "$whole" --
            elif [[ $command == set ]]; then
                if [[ -n $reset ]]; then _ggroupfs_resettable "$whole"; else _ggroupfs_settings_of "$whole"; fi
                _ggroupfs_groups "$mount" "$whole"
            elif [[ $command == cdi ]]; then
                _ggroupfs_offer "$whole" generate
            elif [[ $command == account ]]; then
                _ggroupfs_slices "$mount" "$whole"
            elif [[ $command == doctor ]]; then
                _ggroupfs_processes "$mount" "$whole"
            elif [[ $command == replay ]]; then
                _ggroupfs_files -f "$whole"
            elif [[ $command == mount ]]; then
                _ggroupfs_files -d "$whole"
            elif [[ $command == umount || $command == upgrade ]]; then
                local -a places=()
                local place kind
                while read -r _ place kind _; do
                    [[ $kind == fuse.ggroupfs ]] && places+=("$place")
                done <"$_ggroupfs_mounts"
                _ggroupfs_offer "$whole" "${places[@]}"
            fi
            ;;
    esac
}

complete -F _ggroupfs ggroupfs
