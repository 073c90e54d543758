# SPDX-License-Identifier: Apache-2.0
# Lays down pages of docs/ whose links lead to pages that are installed as well. Of other links the
# text stays, and for a page where it is in the sources. Run by cmake --install, with KVQ_SOURCE,
# KVQ_BINARY, KVQ_PAGES and KVQ_TO set.
foreach(page IN LISTS KVQ_PAGES)
    file(READ ${KVQ_SOURCE}/docs/${page} text)
    foreach(other IN LISTS KVQ_PAGES)
        string(REPLACE "](${other}" "](@${other}" text "${text}")
    endforeach()
    string(REGEX REPLACE "\\[([^]]*)\\]\\(\\.\\./[^)]*\\)" "\\1" text "${text}")
    string(REGEX REPLACE "\\[([^]]*)\\]\\(([a-z0-9/-]+\\.md)(#[^)]*)?\\)"
           "\\1 (docs/\\2 of the sources)" text "${text}")
    string(REPLACE "](@" "](" text "${text}")
    file(WRITE ${KVQ_BINARY}/pages/${page} "${text}")
    file(INSTALL DESTINATION "${KVQ_TO}" TYPE FILE FILES ${KVQ_BINARY}/pages/${page})
endforeach()
