# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` lays down: the library with its headers and pkg-config file, the
# programs, their manual pages, the configuration file and what systemd wants to know. Programs and
# libraries are stripped on the way.
install(CODE "set(CMAKE_INSTALL_DO_STRIP 1)")
install(TARGETS kvqd kvqctl kvq-run kvq-bench kvq-codebook
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

set_target_properties(kvq PROPERTIES INSTALL_RPATH "")
install(TARGETS kvq LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET kvq_gpu_images)
    install(TARGETS kvq_gpu_images LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES client/kvq.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY client/kvq DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
# Relative to the file itself, so that the tree may be installed under any prefix.
file(RELATIVE_PATH KVQ_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(packaging/kvq.pc.in ${CMAKE_BINARY_DIR}/kvq.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvq.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES docs/man/kvqctl.1 docs/man/kvq-run.1 docs/man/kvq-bench.1 docs/man/kvq-codebook.1
        DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES docs/man/kvqd.8 DESTINATION ${CMAKE_INSTALL_MANDIR}/man8)
configure_file(packaging/kvqd.service.in ${CMAKE_BINARY_DIR}/kvqd.service @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvqd.service DESTINATION lib/systemd/system)
install(FILES packaging/kvqd.sysusers DESTINATION lib/sysusers.d RENAME kvqd.conf)
install(FILES packaging/kvqd.conf DESTINATION ${CMAKE_INSTALL_SYSCONFDIR})
