// SPDX-License-Identifier: Apache-2.0
//
// The files of the page at /, as cmake/embed.cmake builds them in.
#ifndef KVQ_DAEMON_HTTP_PAGE_H
#define KVQ_DAEMON_HTTP_PAGE_H

extern const unsigned char kvq__kvq_html[], kvq__kvq_css[], kvq__kvq_js[];
extern const unsigned long kvq__kvq_html_bytes, kvq__kvq_css_bytes, kvq__kvq_js_bytes;

#endif
