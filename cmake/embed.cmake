# SPDX-License-Identifier: Apache-2.0
# Writes files into a C source: cmake -DOUT=FILE -DFILES=A;B -P embed.cmake. FILE then defines for
# each file NAME.END the bytes kvq__NAME_END, and their number kvq__NAME_END_bytes.
file(WRITE ${OUT}.new "// Made by cmake/embed.cmake.\n#include \"daemon/http/page.h\"\n")
foreach(path ${FILES})
    get_filename_component(name ${path} NAME)
    string(REPLACE . _ name ${name})
    file(READ ${path} bytes HEX)
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
    string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
    file(APPEND ${OUT}.new "const unsigned char kvq__${name}[] = {\n${bytes}};\n"
         "const unsigned long kvq__${name}_bytes = sizeof kvq__${name};\n")
endforeach()
file(RENAME ${OUT}.new ${OUT})
