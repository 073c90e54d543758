# SPDX-License-Identifier: Apache-2.0
# Debian packages by CPack, one for each component of cmake/install.cmake; tools/deb.sh makes them.
set(KVQ_DEB_VERSION ${PROJECT_VERSION}-1 CACHE STRING "Version of the packages")
set(KVQ_DEB_MAINTAINER "The kvq authors <kvq@example.org>" CACHE STRING
    "Maintainer that the packages name: NAME <ADDRESS>")
set(kvq_packages kvqd kvq-tools libkvq0 libkvq-dev python3-kvq)

# The changelog's date: that of the last commit, so that the same sources make the same packages.
execute_process(COMMAND git -C ${CMAKE_SOURCE_DIR} log -1 --format=%cD
                OUTPUT_VARIABLE KVQ_DEB_DATE OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT KVQ_DEB_DATE)
    set(KVQ_DEB_DATE "Thu, 01 Jan 2026 00:00:00 +0000")
endif()
configure_file(packaging/deb/changelog.in ${CMAKE_BINARY_DIR}/changelog.Debian @ONLY)
foreach(pair CHANGELOG.md:changelog.gz "${CMAKE_BINARY_DIR}/changelog.Debian:changelog.Debian.gz")
    string(REPLACE ":" ";" pair "${pair}")
    list(GET pair 0 from)
    list(GET pair 1 to)
    execute_process(COMMAND gzip -9nc ${from} OUTPUT_FILE ${CMAKE_BINARY_DIR}/${to}
                    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
foreach(package ${kvq_packages})
    install(FILES packaging/deb/copyright NOTICE ${CMAKE_BINARY_DIR}/changelog.gz
            ${CMAKE_BINARY_DIR}/changelog.Debian.gz
            DESTINATION share/doc/${package} COMPONENT ${package})
    set(kvq_more "")
    if(package STREQUAL libkvq0)
        set(kvq_more "# CPack adds these scripts to every package with a library.\n\
libkvq0: maintscript-calls-ldconfig *\n")
    endif()
    configure_file(packaging/deb/overrides.in ${CMAKE_BINARY_DIR}/overrides/${package} @ONLY)
    install(FILES ${CMAKE_BINARY_DIR}/overrides/${package} DESTINATION share/lintian/overrides
            COMPONENT ${package})
endforeach()

# Python finds the library where the dynamic linker does.
set(kvq_python lib/python3/dist-packages)
install(DIRECTORY client/python/kvq DESTINATION ${kvq_python} COMPONENT python3-kvq
        PATTERN __pycache__ EXCLUDE)
configure_file(packaging/deb/METADATA.in ${CMAKE_BINARY_DIR}/python/METADATA @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/python/METADATA packaging/deb/entry_points.txt
        DESTINATION ${kvq_python}/kvq-${PROJECT_VERSION}.dist-info COMPONENT python3-kvq)

set(CPACK_GENERATOR DEB)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL ${kvq_packages})
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_PACKAGE_NAME kvq)
set(CPACK_PACKAGE_CONTACT "${KVQ_DEB_MAINTAINER}")
set(CPACK_SET_DESTDIR ON) # since /etc is not below /usr
set(CPACK_INSTALL_PREFIX /usr)
# With any other text CPack would begin every description with it.
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${CMAKE_PROJECT_NAME} built using CMake")
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_PACKAGE_VERSION ${KVQ_DEB_VERSION})
set(CPACK_DEBIAN_PACKAGE_SOURCE kvq)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR}/lib) # kvq-tools' libkvq
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)

# kvq_package(NAME SECTION DEPENDS SUMMARY TEXT [CONTROL_FILE...])
function(kvq_package name section depends summary text)
    string(TOUPPER ${name} upper)
    list(TRANSFORM ARGN PREPEND ${CMAKE_SOURCE_DIR}/packaging/deb/${name}/)
    foreach(pair "NAME|${name}" "SECTION|${section}" "DEPENDS|${depends}")
        string(REPLACE "|" ";" pair "${pair}")
        list(GET pair 0 key)
        list(REMOVE_AT pair 0)
        set(CPACK_DEBIAN_${upper}_PACKAGE_${key} "${pair}" PARENT_SCOPE)
    endforeach()
    set(CPACK_COMPONENT_${upper}_DESCRIPTION "${summary}\n${text}" PARENT_SCOPE)
    set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}\n${text}" PARENT_SCOPE)
    set(CPACK_DEBIAN_${upper}_PACKAGE_CONTROL_EXTRA "${ARGN}" PARENT_SCOPE)
endfunction()
set(same "(= ${KVQ_DEB_VERSION})")
set(about "kvqd owns the quantized KV caches of LLM sessions: engines hand over\n\
keys and values as they produce them, and ask for attention over them.\n")
kvq_package(kvqd misc systemd "daemon that owns quantized KV caches of LLM sessions"
    "${about}This package has the daemon, kvqctl to administer it,\nand its systemd service."
    conffiles postinst prerm postrm)
kvq_package(kvq-tools utils "libkvq0 ${same}" "engine, benchmarks and codebooks for kvqd"
    "${about}This package has kvq-run, a small engine, kvq-bench,\nand kvq-codebook.")
set(CPACK_DEBIAN_KVQ-TOOLS_PACKAGE_RECOMMENDS kvqd)
kvq_package(libkvq0 libs "" "client library of kvqd"
    "${about}This package has the library that engines are linked with."
    shlibs symbols triggers)
set(CPACK_DEBIAN_LIBKVQ0_PACKAGE_SUGGESTS kvqd)
kvq_package(libkvq-dev libdevel "libkvq0 ${same}" "client library of kvqd, to compile with"
    "${about}This package has the headers of the library, and what\npkg-config needs.")
set(CPACK_DEBIAN_LIBKVQ-DEV_PACKAGE_SHLIBDEPS OFF)
kvq_package(python3-kvq python "libkvq0 ${same}, python3:any, python3-numpy"
    "client of kvqd for Python"
    "${about}This package has the client for NumPy and PyTorch,\nover the library."
    postinst prerm)
set(CPACK_DEBIAN_PYTHON3-KVQ_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_PYTHON3-KVQ_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_PYTHON3-KVQ_PACKAGE_RECOMMENDS kvqd)
include(CPack)
