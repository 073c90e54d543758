# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` lays down: the library with its headers and pkg-config file, the
# programs, their manual pages, the configuration file and what systemd wants to know. Programs and
# libraries are stripped on the way.
# Each line names its component, of which cmake/deb.cmake makes a Debian package.
install(CODE "set(CMAKE_INSTALL_DO_STRIP 1)" ALL_COMPONENTS)
install(TARGETS kvqd kvqctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT kvqd)
install(TARGETS kvq-run kvq-bench kvq-codebook
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT kvq-tools)

set_target_properties(kvq PROPERTIES INSTALL_RPATH "")
install(TARGETS kvq LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        COMPONENT libkvq0 NAMELINK_COMPONENT libkvq-dev)
if(TARGET kvq_gpu_images)
    install(TARGETS kvq_gpu_images LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT libkvq0)
endif()
install(FILES client/kvq.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT libkvq-dev)
install(DIRECTORY client/kvq DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT libkvq-dev
        FILES_MATCHING PATTERN *.h)
# Relative to the file itself, so that the tree may be installed under any prefix.
file(RELATIVE_PATH KVQ_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(packaging/kvq.pc.in ${CMAKE_BINARY_DIR}/kvq.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvq.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT libkvq-dev)

# Installs manual pages, compressed in a Debian package: kvq_install_pages(COMPONENT SECTION PAGE..)
function(kvq_install_pages component section)
    foreach(page IN LISTS ARGN)
        if(KVQ_DEB)
            get_filename_component(name ${page} NAME)
            set(packed ${CMAKE_BINARY_DIR}/${name}.gz)
            execute_process(COMMAND gzip -9nc ${page} OUTPUT_FILE ${packed}
                            COMMAND_ERROR_IS_FATAL ANY)
            set(page ${packed})
        endif()
        install(FILES ${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section}
                COMPONENT ${component})
    endforeach()
endfunction()
set(man ${CMAKE_SOURCE_DIR}/docs/man)
kvq_install_pages(kvqd 8 ${man}/kvqd.8)
kvq_install_pages(kvqd 1 ${man}/kvqctl.1)
kvq_install_pages(kvq-tools 1 ${man}/kvq-run.1 ${man}/kvq-bench.1 ${man}/kvq-codebook.1)
include(cmake/man3.cmake)
kvq_make_pages(${CMAKE_BINARY_DIR}/man3)
kvq_install_pages(libkvq-dev 3 ${kvq_pages})

# Where shells look for completion by themselves.
function(kvq_install_completion file folder name)
    install(FILES ${file} DESTINATION ${CMAKE_INSTALL_DATADIR}/${folder} RENAME ${name}
            COMPONENT kvqd)
endfunction()
set(kvq_printed ${CMAKE_BINARY_DIR}/tools/kvqctl/completion)
kvq_install_completion(${kvq_printed}.bash bash-completion/completions kvqctl)
kvq_install_completion(${kvq_printed}.zsh zsh/site-functions _kvqctl)
kvq_install_completion(${kvq_printed}.fish fish/vendor_completions.d kvqctl.fish)
kvq_install_completion(packaging/completion/kvqd.bash bash-completion/completions kvqd)
kvq_install_completion(packaging/completion/_kvqd zsh/site-functions _kvqd)
kvq_install_completion(packaging/completion/kvqd.fish fish/vendor_completions.d kvqd.fish)

configure_file(packaging/kvqd.service.in ${CMAKE_BINARY_DIR}/kvqd.service @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvqd.service packaging/kvqd-nvidia.service
        DESTINATION lib/systemd/system COMPONENT kvqd)
install(FILES packaging/kvqd.sysusers DESTINATION lib/sysusers.d RENAME kvqd.conf COMPONENT kvqd)
install(FILES packaging/kvqd.tmpfiles DESTINATION lib/tmpfiles.d RENAME kvqd.conf COMPONENT kvqd)
install(FILES packaging/kvqd-cpu.conf DESTINATION share/doc/kvqd/examples COMPONENT kvqd)
# Where help, manual pages and alerts send people, and what these pages send operators to.
install(CODE "
    set(KVQ_SOURCE \"${CMAKE_SOURCE_DIR}\")
    set(KVQ_BINARY \"${CMAKE_BINARY_DIR}\")
    set(KVQ_PAGES operations.md troubleshooting.md formats.md protocol.md sizing.md upgrading.md
                  containers.md nodes.md gpus.md quality.md)
    set(KVQ_TO \"\${CMAKE_INSTALL_PREFIX}/share/doc/kvqd\")
    include(\"${CMAKE_SOURCE_DIR}/cmake/install_pages.cmake\")" COMPONENT kvqd)
install(FILES docs/sizing.svg DESTINATION share/doc/kvqd COMPONENT kvqd)
install(FILES packaging/prometheus/kvqd.rules.yml packaging/prometheus/kvqd.dashboard.json
        DESTINATION ${CMAKE_INSTALL_DATADIR}/kvqd/prometheus COMPONENT kvqd)
set(kvq_conf packaging/kvqd.conf)
if(KVQ_DEB) # what is saved when the daemon ends outlives an upgrade
    file(READ packaging/kvqd.conf text)
    string(REPLACE "# storage_dir =                ;" "storage_dir = /var/lib/kvqd    ;" text
           "${text}")
    set(kvq_conf ${CMAKE_BINARY_DIR}/kvqd.conf)
    file(CONFIGURE OUTPUT ${kvq_conf} CONTENT "${text}" @ONLY)
endif()
# Where the unit looks. A folder below the prefix is named relative to that, so that cmake --install
# may be given another prefix. For /usr and /opt/NAME the folder is not below, but /etc and
# /etc/opt/NAME.
set(kvq_etc ${CMAKE_INSTALL_SYSCONFDIR})
if(NOT CMAKE_INSTALL_FULL_SYSCONFDIR STREQUAL
   "${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_SYSCONFDIR}")
    set(kvq_etc ${CMAKE_INSTALL_FULL_SYSCONFDIR})
endif()
if(KVQ_DEB) # dpkg asks before it replaces what somebody has changed
    install(FILES ${kvq_conf} DESTINATION ${kvq_etc}/kvqd COMPONENT kvqd)
else()
    set(to ${kvq_etc}/kvqd)
    if(NOT IS_ABSOLUTE ${kvq_etc})
        set(to "\${CMAKE_INSTALL_PREFIX}/${kvq_etc}/kvqd")
    endif()
    install(CODE "
        if(EXISTS \"\$ENV{DESTDIR}${to}/kvqd.conf\")
            message(STATUS \"Kept as it is: \$ENV{DESTDIR}${to}/kvqd.conf\")
        else()
            file(INSTALL DESTINATION \"${to}\" TYPE FILE FILES \"${CMAKE_SOURCE_DIR}/${kvq_conf}\")
        endif()" COMPONENT kvqd)
endif()
install(FILES packaging/kvqd.logrotate DESTINATION ${kvq_etc}/logrotate.d RENAME kvqd
        COMPONENT kvqd)
