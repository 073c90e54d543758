# SPDX-License-Identifier: Apache-2.0
# What the Python package brings along (client/python/pyproject.toml): the daemon, kvqctl and the
# library, under the names that the package looks for.
# One file: wheels have no links.
set_target_properties(kvq PROPERTIES VERSION ${PROJECT_VERSION_MAJOR})
install(TARGETS kvqd kvqctl RUNTIME DESTINATION kvq/bin)
install(TARGETS kvq LIBRARY DESTINATION kvq/lib NAMELINK_SKIP)
if(TARGET kvq_gpu_images)
    install(TARGETS kvq_gpu_images LIBRARY DESTINATION kvq/lib)
endif()
install(FILES LICENSE NOTICE DESTINATION ${SKBUILD_METADATA_DIR}/licenses)
