# SPDX-License-Identifier: Apache-2.0
# bash completion for kvqd: its flags as kvqd --help lists them, and files and folders behind them.
_kvqd()
{
    local cur=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD - 1]} flags line kind=''
    if [[ $cur == = ]]; then
        cur=''
    elif [[ $last == = ]]; then
        last=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    flags=$("$1" --help 2>/dev/null)
    COMPREPLY=()
    while read -r line; do
        line=" ${line#-?, }"
        [[ $line == " $last "* ]] && kind=${line#" $last "} kind=${kind%% *}
    done <<< "$flags"
    [[ $last == -c ]] && kind=PATH
    case $kind in
    PATH)
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return
        ;;
    esac
    [[ $cur == -* ]] &&
        COMPREPLY=($(compgen -W "$(grep -o -e '^  \(-[a-zA-Z], \)\?--[a-z-]*' <<< "$flags" |
            grep -o -e '--[a-z-]*')" -- "$cur"))
}
complete -F _kvqd kvqd
