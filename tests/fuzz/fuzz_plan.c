// Any text as plan.json: an error, or a plan whose text reads back to the same hash and whose order
// is in range.
#include <string.h>

#include "common/check.h"
#include "common/plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct plan p, back;
    struct err e = {0};
    if (plan_parse((const char *)data, size, "fuzz", &p, &e) < 0) {
        CHECK(e.msg[0] && !strchr(e.msg, '\n'));
        return 0;
    }
    CHECK(plan_parse(p.json, strlen(p.json), "again", &back, &e) == 0);
    CHECK(strcmp(p.hash, back.hash) == 0);
    int64_t last = p.c.train.steps - 1;
    int passes = plan_passes(&p, last);
    CHECK(passes >= 1 && passes <= plan_max_passes(&p));
    CHECK(plan_lr(&p, last) >= 0 && plan_lr(&p, last) <= p.c.optim.lr);
    uint64_t end = (uint64_t)p.c.train.steps * (uint64_t)p.c.train.batch_rows;
    struct sample x = plan_train_sample(&p, end - 1);
    CHECK(x.index < p.sources[x.source].train_samples && x.epoch < PLAN_VAL_EPOCH);
    if (plan_val_rows(&p))
        (void)plan_val_sample(&p, plan_val_rows(&p) - 1);
    plan_release(&p);
    plan_release(&back);
    return 0;
}
