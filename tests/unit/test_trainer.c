/*
 * fb-trainer as a process, with a real loader and a scheduler played by the test: what it says
 * when, and how it leaves. That a whole run repeats bit for bit is tests/run/resume.sh.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/bus.h"
#include "common/clock.h"
#include "common/cursor.h"
#include "common/fs.h"
#include "common/rundir.h"
#include "tests/unit/temp_dir.h"
#include "tests/unit/text_case.h"

#define STEPS   12
#define WAIT_MS 15000 /* for what must come */

static char *dir, *bin;
static struct rundir run;

struct fixture {
    struct bus *bus;
    struct endpoint *scheduler;
    char peer[BUS_PEER_BYTES];
    pid_t loader, trainer;
};

/* -- a run directory with one small source -- */

static int make_run(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    int existed;
    dir = temp_dir_make();
    bin = text_case_bin();
    text_case_tokenizer(dir, "tokenizer.json");
    text_case_source(dir, "one", 0, 60, 1 << 20);
    char *yaml = mem_printf("run: {name: r, dir: %s}\n"
                            "model: {dim: 16, layers: 1, heads: 2}\n"
                            "data: {tokenizer: %s/tokenizer.json, seq_len: 32,"
                            " sources: [{name: one, path: %s/one}]}\n"
                            "train: {steps: %d, batch_rows: 4, micro_rows: 2, passes: ["
                            "{from: 0, passes: {1: 0.4, 2: 0.3, 3: 0.3}}]}\n"
                            "optim: {warmup_steps: 1}\n"
                            "process: {trainer_threads: 1, heartbeat_seconds: 60}\n",
        dir, dir, dir, STEPS);
    if (config_parse(yaml, strlen(yaml), "test", NULL, 0, &c, &e) < 0 ||
        rundir_create(&c, &run, &existed, &e) < 0)
        fail_msg("%s", e.msg);
    config_release(&c);
    free(yaml);
    return 0;
}

static int drop_run(void **state)
{
    (void)state;
    rundir_release(&run);
    temp_dir_remove(&dir);
    free(bin);
    return 0;
}

/* -- processes -- */

static pid_t start(const char *program, const char *option)
{
    char *path = mem_printf("%s/%s", bin, program);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDOUT_FILENO);
        dup2(null, STDERR_FILENO);
        execl(path, program, "--run", run.path, option, (char *)NULL);
        _exit(127);
    }
    free(path);
    return pid;
}

static int exit_of(pid_t *pid)
{
    int status;
    for (double end = clock_seconds() + WAIT_MS * 1e-3; clock_seconds() < end; usleep(2000)) {
        if (waitpid(*pid, &status, WNOHANG) != *pid)
            continue;
        *pid = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    return -1000;
}

static int set_up(void **state)
{
    struct fixture *f = mem_array(1, sizeof *f);
    char *sock = rundir_path(&run, "%s", RUNDIR_CONTROL_SOCK);
    assert_int_equal(bus_new(&f->bus, NULL), 0);
    assert_int_equal(endpoint_bind(f->bus, sock, &f->scheduler, NULL), 0);
    f->loader = start("fb-loader", "--standalone");
    f->trainer = start("fb-trainer", NULL);
    free(sock);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    pid_t *pids[] = {&f->trainer, &f->loader};
    for (size_t i = 0; i < 2; i++)
        if (*pids[i] > 0) {
            kill(*pids[i], SIGKILL);
            waitpid(*pids[i], NULL, 0);
        }
    endpoint_close(&f->scheduler);
    bus_free(&f->bus);
    char *checkpoints = rundir_path(&run, "checkpoints");
    assert_int_equal(fs_remove_tree(checkpoints, NULL), 0);
    free(checkpoints);
    free(f);
    return 0;
}

/* -- the scheduler's part -- */

/* The next message of a type, as JSON; READY is passed over unless asked for. */
static json_t *hear(struct fixture *f, int type, uint32_t epoch)
{
    struct err e = {0};
    for (double end = clock_seconds() + WAIT_MS * 1e-3; clock_seconds() < end;) {
        struct message m;
        if (endpoint_recv(f->scheduler, 20, &m, &e) != 1)
            continue;
        int got = m.head.type;
        memcpy(f->peer, m.peer, sizeof f->peer);
        json_t *j = got == type ? message_json(&m, &e) : NULL;
        int of_epoch = m.head.run_epoch == epoch;
        message_release(&m);
        if (j && of_epoch)
            return j;
        json_decref(j);
        if (got != WIRE_READY && got != WIRE_HELLO && got != WIRE_HEARTBEAT && of_epoch)
            fail_msg("%s came, %s expected", wire_type_name(got), wire_type_name(type));
    }
    fail_msg("no %s in %d ms", wire_type_name(type), WAIT_MS);
    return NULL;
}

static void tell(struct fixture *f, int type, uint32_t epoch, json_t *j)
{
    assert_int_equal(endpoint_send_json(f->scheduler, f->peer, type, epoch, 0, j, NULL), 0);
}

static int64_t number(const json_t *j, const char *key)
{
    assert_true(json_is_integer(json_object_get(j, key)));
    return json_integer_value(json_object_get(j, key));
}

static void expect_ready(struct fixture *f, uint32_t epoch, int64_t step)
{
    json_t *j = hear(f, WIRE_READY, epoch);
    assert_int_equal(number(j, "step"), step);
    json_decref(j);
}

static void welcome(struct fixture *f, uint32_t epoch)
{
    json_t *j = hear(f, WIRE_HELLO, 0);
    assert_string_equal(json_string_value(json_object_get(j, "plan_hash")), run.plan.hash);
    json_decref(j);
    tell(f, WIRE_WELCOME, epoch,
        json_pack("{s:i, s:n, s:i}", "heartbeat_ms", 60000, "checkpoint", "step", 0));
}

static void grant(struct fixture *f, uint32_t epoch, int64_t step, int save)
{
    tell(f, WIRE_GRANT, epoch,
        json_pack("{s:I, s:b}", "step", (json_int_t)step, "checkpoint", save));
}

/* Hears the report of `step`, checks it against the plan and returns its total loss. */
static double expect_step(struct fixture *f, uint32_t epoch, int64_t step)
{
    char ids[20];
    json_t *j = hear(f, WIRE_STEP, epoch);
    snprintf(ids, sizeof ids, "%016llx", (unsigned long long)plan_ids_digest(&run.plan, step));
    assert_int_equal(number(j, "step"), step);
    assert_int_equal(number(j, "passes"), plan_passes(&run.plan, step));
    assert_int_equal(number(j, "rows"), 4);
    assert_int_equal(number(j, "tokens"), 4 * 32);
    assert_int_equal(json_array_size(json_object_get(j, "losses")), plan_passes(&run.plan, step));
    assert_string_equal(json_string_value(json_object_get(j, "ids")), ids);
    assert_true(json_real_value(json_object_get(j, "lr")) == plan_lr(&run.plan, step));
    double total = json_real_value(json_object_get(j, "total"));
    assert_true(total > 1 && total < 20);
    json_decref(j);
    return total;
}

/* Hears SAVED of `step`; whether it holds files or an error. */
static int saved_well(struct fixture *f, uint32_t epoch, int64_t step)
{
    json_t *j = hear(f, WIRE_SAVED, epoch);
    assert_int_equal(number(j, "step"), step);
    int well = json_array_size(json_object_get(j, "files")) == 2;
    assert_int_equal(well, json_object_get(j, "error") == NULL);
    json_decref(j);
    return well;
}

static void ask_checkpoint(struct fixture *f, uint32_t epoch, int64_t step)
{
    tell(f, WIRE_CHECKPOINT, epoch, json_pack("{s:I}", "step", (json_int_t)step));
}

/* -- the tests -- */

static void test_a_run_from_hello_to_finish(void **state)
{
    struct fixture *f = *state;
    welcome(f, 1);
    for (int64_t s = 0; s < 4; s++) /* ready four steps ahead of the first grant */
        expect_ready(f, 1, s);
    for (int64_t s = 0; s < STEPS; s++) {
        grant(f, 1, s, 0);
        expect_step(f, 1, s);
    }
    tell(f, WIRE_FINISH, 1, json_pack("{s:s}", "reason", "done"));
    assert_int_equal(exit_of(&f->trainer), 0);
}

/* The grants of 0 … 3 are out, 1 asks for a checkpoint, and a clean stop asks for one behind 3:
 * both are written. */
static void test_orders_for_two_checkpoints(void **state)
{
    struct fixture *f = *state;
    welcome(f, 1);
    for (int64_t s = 0; s < 4; s++)
        expect_ready(f, 1, s);
    ask_checkpoint(f, 1, 4);
    for (int64_t s = 0; s < 4; s++)
        grant(f, 1, s, s == 1);
    int steps = 0, saved = 0;
    while (steps < 4 || saved < 2) {
        struct message m;
        if (endpoint_recv(f->scheduler, WAIT_MS, &m, NULL) != 1)
            fail_msg("%d steps and %d checkpoints came", steps, saved);
        steps += m.head.type == WIRE_STEP;
        saved += m.head.type == WIRE_SAVED;
        message_release(&m);
    }
    ask_checkpoint(f, 1, 4); /* asked once more: it is there, and said again */
    assert_true(saved_well(f, 1, 4));
    tell(f, WIRE_FINISH, 1, json_pack("{s:s}", "reason", "stopped"));
    assert_int_equal(exit_of(&f->trainer), 0);
}

static void test_reload_repeats_the_same_bits(void **state)
{
    struct fixture *f = *state;
    double first[STEPS];
    welcome(f, 1);
    for (int64_t s = 0; s < 8; s++) {
        grant(f, 1, s, s == 3);
        first[s] = expect_step(f, 1, s);
        if (s == 3)
            assert_true(saved_well(f, 1, 4));
    }
    tell(f, WIRE_RELOAD, 2,
        json_pack("{s:s, s:i, s:s}", "checkpoint", "step-00000004", "step", 4, "reason", "test"));
    expect_ready(f, 2, 4);
    grant(f, 1, 4, 0); /* of the old epoch: void */
    for (int64_t s = 4; s < 8; s++) {
        grant(f, 2, s, 0);
        assert_true(expect_step(f, 2, s) == first[s]);
    }
    tell(
        f, WIRE_RELOAD, 3, json_pack("{s:n, s:i, s:s}", "checkpoint", "step", 0, "reason", "test"));
    for (int64_t s = 0; s < 3; s++) {
        grant(f, 3, s, 0);
        assert_true(expect_step(f, 3, s) == first[s]);
    }
}

static void test_a_failed_checkpoint_is_said_and_tried_again(void **state)
{
    struct fixture *f = *state;
    char *taken = rundir_path(&run, "checkpoints/step-00000001");
    char *manifest = mem_printf("%s/MANIFEST.json", taken);
    assert_int_equal(fs_mkdir_p(taken, 0755, NULL), 0);
    assert_int_equal(fs_write_atomic(manifest, "{}", 2, NULL), 0);
    welcome(f, 1);
    grant(f, 1, 0, 1);
    expect_step(f, 1, 0);
    assert_false(saved_well(f, 1, 1));
    assert_int_equal(fs_remove_tree(taken, NULL), 0);
    ask_checkpoint(f, 1, 1);
    assert_true(saved_well(f, 1, 1));
    grant(f, 1, 1, 0); /* and training goes on */
    expect_step(f, 1, 1);
    free(manifest);
    free(taken);
}

static void test_the_loader_may_die(void **state)
{
    struct fixture *f = *state;
    welcome(f, 1);
    grant(f, 1, 0, 0);
    expect_step(f, 1, 0);
    kill(f->loader, SIGKILL);
    waitpid(f->loader, NULL, 0);
    f->loader = start("fb-loader", "--standalone");
    for (int64_t s = 1; s < STEPS; s++) {
        grant(f, 1, s, 0);
        expect_step(f, 1, s);
    }
}

static void test_leaves_when_asked(void **state)
{
    struct fixture *f = *state;
    welcome(f, 1);
    expect_ready(f, 1, 0);
    kill(f->trainer, SIGTERM);
    json_decref(hear(f, WIRE_BYE, 1));
    assert_int_equal(exit_of(&f->trainer), 0);
}

static void test_refused(void **state)
{
    struct fixture *f = *state;
    json_decref(hear(f, WIRE_HELLO, 0));
    tell(f, WIRE_REFUSE, 0, json_pack("{s:s}", "reason", "another plan"));
    assert_int_equal(exit_of(&f->trainer), 100);
}

static void test_states_that_cannot_be_loaded(void **state)
{
    static const struct {
        const char *checkpoint;
        int step;
    } cases[] = {
        {"step-00000004", 4}, {"step-00000004", 5}, {"../x", 4}, {NULL, 3}, {"step-00000099", 99}};
    struct fixture *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_decref(hear(f, WIRE_HELLO, 0));
        tell(f, WIRE_WELCOME, 1,
            json_pack("{s:s?, s:i}", "checkpoint", cases[i].checkpoint, "step", cases[i].step));
        int status = exit_of(&f->trainer);
        if (status != 100 && status != 111)
            fail_msg("case %zu: exit status %d", i, status);
        f->trainer = start("fb-trainer", NULL);
    }
}

/* Two ranks: without mpirun, or without OpenMPI, there is nobody to train with. */
static void test_wrong_usage(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *option;
        int status;
    } cases[] = {{"--world=2", 100}, {"--world=0", 2}, {"--rank=1", 2}, {"--rank=x", 2},
        {"--nonsense", 2}, {"extra", 2}, {"--run=/nonexistent", 1}, {"--help", 0}};
    json_decref(hear(f, WIRE_HELLO, 0));
    kill(f->trainer, SIGTERM);
    assert_int_equal(exit_of(&f->trainer), 0); /* also before it was welcomed */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fflush(stdout);
        f->trainer = start("fb-trainer", cases[i].option);
        int status = exit_of(&f->trainer);
        if (status != cases[i].status)
            fail_msg("%s: exit status %d", cases[i].option, status);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_run_from_hello_to_finish, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_orders_for_two_checkpoints, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_reload_repeats_the_same_bits, set_up, tear_down),
        cmocka_unit_test_setup_teardown(
            test_a_failed_checkpoint_is_said_and_tried_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_the_loader_may_die, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_leaves_when_asked, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_states_that_cannot_be_loaded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_usage, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, make_run, drop_run);
}
