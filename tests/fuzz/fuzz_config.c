// Any text as a config: an error or a config that prints to what reads back to the same.
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config c, back;
    struct err e = {0};
    if (config_parse((const char *)data, size, "fuzz", NULL, 0, &c, &e) < 0) {
        CHECK(e.msg[0] && !strchr(e.msg, '\n'));
        return 0;
    }
    struct buf first = BUF_INIT, second = BUF_INIT;
    config_print(&c, &first);
    CHECK(config_parse(first.data, first.len, "printed", NULL, 0, &back, &e) == 0);
    config_print(&back, &second);
    CHECK(strcmp(first.data, second.data) == 0);
    json_t *j = config_plan_json(&c);
    json_decref(j);
    config_release(&c);
    config_release(&back);
    buf_release(&first);
    buf_release(&second);
    return 0;
}
