// Pass count and learning rate of a step.
#include <math.h>

#include "common/plan.h"
#include "common/plan_keys.h"

/* First step of phase i. */
static int64_t phase_start(const struct plan *p, int i)
{
    return llround(p->c.train.phases[i].from * (double)p->c.train.steps);
}

/*
 * The steps of a phase walk the unit circle by the golden ratio from a start that the seed gives,
 * and the shares divide the circle. Such a walk fills every arc evenly: any run of steps meets the
 * shares to within a few.
 */
int plan_passes(const struct plan *p, int64_t step)
{
    int i = p->c.train.phase_count - 1;
    while (i > 0 && step < phase_start(p, i))
        i--;
    const struct pass_phase *phase = &p->c.train.phases[i];
    uint64_t start = rng_key(plan_key(p->c.train.seed, PLAN_PASSES), (uint64_t)i);
    uint64_t turn = start + (uint64_t)(step - phase_start(p, i)) * 0x9e3779b97f4a7c15u;
    double at = (double)(turn >> 11) * 0x1p-53;
    int last = 1;
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++) {
        if (phase->share[k] == 0)
            continue;
        last = k;
        if (at < phase->share[k])
            return k;
        at -= phase->share[k];
    }
    return last; /* the shares sum to 1 but for rounding */
}

int plan_max_passes(const struct plan *p)
{
    return config_max_passes(&p->c);
}

static double fall_cosine(const struct plan *p, double step)
{
    double warm = (double)p->c.optim.warmup_steps, steps = (double)p->c.train.steps;
    return 0.5 * (1 + cos(3.14159265358979323846 * (step - warm) / (steps - warm)));
}

/* Steps of the cooldown, at the end of the run. */
static double cooldown_steps(const struct plan *p)
{
    return floor(p->c.optim.cooldown * (double)p->c.train.steps);
}

static double fall_wsd(const struct plan *p, double step)
{
    double steps = (double)p->c.train.steps, cooldown = cooldown_steps(p);
    return step < steps - cooldown ? 1 : (steps - step) / cooldown;
}

static double fall_none(const struct plan *p, double step)
{
    (void)p;
    (void)step;
    return 1;
}

/* What is left of lr − min_lr at a step after the warm-up, 1 to 0. */
static double (*const falls[])(const struct plan *p, double step) = {
    [LR_COSINE] = fall_cosine, [LR_WSD] = fall_wsd, [LR_CONSTANT] = fall_none};

double plan_lr(const struct plan *p, int64_t step)
{
    double lr = p->c.optim.lr, low = p->c.optim.min_lr;
    if (step < p->c.optim.warmup_steps)
        return lr * (double)(step + 1) / (double)p->c.optim.warmup_steps;
    return low + (lr - low) * falls[p->c.optim.schedule](p, (double)step);
}

double plan_z_loss(const struct plan *p, int64_t step)
{
    int late = (double)step >= (double)p->c.train.steps - cooldown_steps(p);
    return !p->c.train.z_loss_late || late ? p->c.train.z_loss : 0;
}
