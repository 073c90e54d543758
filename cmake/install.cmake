# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` lays down: the library with its one header and pkg-config file, the
# programs, their manual pages and the systemd unit.
foreach(program kvqd kvqctl kvq-run kvq-bench)
    if(TARGET ${program})
        install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    endif()
endforeach()
if(TARGET kvq)
    set_target_properties(kvq PROPERTIES INSTALL_RPATH "")
    install(TARGETS kvq LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(FILES client/kvq.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
    # Relative to the file itself, so that the tree may be installed under any prefix.
    file(RELATIVE_PATH KVQ_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    configure_file(packaging/kvq.pc.in ${CMAKE_BINARY_DIR}/kvq.pc @ONLY)
    install(FILES ${CMAKE_BINARY_DIR}/kvq.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

foreach(page kvqctl.1 kvq-run.1 kvq-bench.1)
    if(EXISTS ${CMAKE_SOURCE_DIR}/docs/man/${page})
        install(FILES docs/man/${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    endif()
endforeach()
if(EXISTS ${CMAKE_SOURCE_DIR}/docs/man/kvqd.8)
    install(FILES docs/man/kvqd.8 DESTINATION ${CMAKE_INSTALL_MANDIR}/man8)
endif()
configure_file(packaging/kvqd.service.in ${CMAKE_BINARY_DIR}/kvqd.service @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvqd.service DESTINATION lib/systemd/system)
