# SPDX-License-Identifier: Apache-2.0
# fish completion for kvqd: its flags as kvqd --help lists them, with what they mean, and files
# behind those with a PATH.
function __kvqd_flags
    set -l words (commandline -opc)
    $words[1] --help 2>/dev/null |
        string replace -rf '^  (?:-\w, )?(--[a-z-]+)(?: [A-Z.,:]+)? +(\S.*)$' '$1\t$2'
end
function __kvqd_takes_path
    set -l words (commandline -opc)
    test "$words[-1]" = -c; and return
    $words[1] --help 2>/dev/null |
        string match -qr -- '^  (?:-\w, )?'(string escape --style=regex -- $words[-1])' PATH'
end
complete -c kvqd -f
complete -c kvqd -n 'string match -q -- "-*" (commandline -ct)' -a '(__kvqd_flags)'
complete -c kvqd -n __kvqd_takes_path -F
