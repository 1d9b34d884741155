/* fb-status: how a run stands, from its scheduler or, when nothing runs, from its files. */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/process.h"
#include "common/version.h"
#include "ops/control.h"
#include "ops/screen.h"
#include "ops/view.h"

#define ANSWER_MS    1000
#define EXIT_USAGE   2
#define STOP_SECONDS 300

static const char usage[] =
    "usage: fb-status RUN [--watch] [--json]\n"
    "       fb-status RUN --stop\n"
    "\n"
    "Shows how the run in directory RUN stands.\n"
    "\n"
    "  --watch      keep showing it until it ends or Ctrl-C\n"
    "  --json       one JSON document\n"
    "  --stop       ask the run to stop: the step under way is finished and saved; waits for it\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0, 1 RUN is not a run or does not stop, 2 usage.\n";

struct arguments {
    const char *run;
    int watch, json, stop;
};

static int read_arguments(int argc, char **argv, struct arguments *a)
{
    static const struct option options[] = {{"watch", no_argument, NULL, 'w'},
        {"json", no_argument, NULL, 'j'}, {"stop", no_argument, NULL, 's'},
        {"help", no_argument, NULL, 'h'}, {"version", no_argument, NULL, 'v'}, {0}};
    int bad = 0;
    for (int opt; (opt = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (opt == 'h' || opt == 'v') {
            fputs(opt == 'h' ? usage : "fb-status " FULLBAND_VERSION "\n", stdout);
            return 0;
        }
        a->watch |= opt == 'w';
        a->json |= opt == 'j';
        a->stop |= opt == 's';
        bad |= opt == '?';
    }
    if (!bad && optind + 1 == argc && a->watch + a->json + a->stop <= 1) {
        a->run = argv[optind];
        return -1;
    }
    fputs(usage, stderr);
    return EXIT_USAGE;
}

static int refresh(struct view *v, struct control *c, struct err *e)
{
    view_take_status(v, control_status(c, ANSWER_MS));
    return view_read(v, e);
}

static int show(struct view *v, int as_json)
{
    struct buf text = BUF_INIT;
    if (as_json) {
        json_t *j = view_json(v);
        json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
        json_decref(j);
    } else if (v->status) {
        view_print_live(v, 100, &text);
        fputs(text.data, stdout);
    } else {
        view_print_summary(v, &text);
        fputs(text.data, stdout);
    }
    buf_release(&text);
    return 0;
}

static int watch(struct view *v, struct control *c, struct err *e)
{
    struct screen screen;
    screen_start(&screen);
    while (v->status) {
        screen_draw(&screen, v);
        usleep(500 * 1000);
        int rc = refresh(v, c, e);
        if (rc < 0)
            return rc;
    }
    screen_clear(&screen);
    return show(v, 0);
}

static int stop(struct view *v, struct control *c, struct err *e)
{
    double until = clock_seconds() + STOP_SECONDS;
    if (!v->status)
        return err_set(
            e, ERR_STATE, "%s: no scheduler answers; the run is %s", v->run->path, view_state(v));
    fprintf(stderr, "fb-status: %s: stopping after step %lld\n", v->run->path,
        (long long)v->history.step);
    while (v->status) {
        if (clock_seconds() > until)
            return err_set(
                e, ERR_TIMEOUT, "%s: still running after %d s", v->run->path, STOP_SECONDS);
        control_ask_stop(c, NULL);
        usleep(300 * 1000);
        int rc = refresh(v, c, e);
        if (rc < 0)
            return rc;
    }
    printf("%s: stopped at step %lld; continue with ops/resume %s\n", v->run->path,
        (long long)v->checkpoint, v->run->path);
    return 0;
}

int main(int argc, char **argv)
{
    struct arguments a = {0};
    struct rundir run;
    struct view v;
    struct control *c = NULL;
    struct err e = {0};
    process_open_streams();
    int status = read_arguments(argc, argv, &a);
    if (status >= 0)
        return status;
    int rc = rundir_open(a.run, &run, &e);
    if (rc < 0) {
        fprintf(stderr, "fb-status: %s\n", e.msg);
        return 1;
    }
    view_start(&v, &run);
    rc = control_new(&run, &c, &e);
    if (rc >= 0)
        rc = refresh(&v, c, &e);
    if (rc >= 0)
        rc = a.stop ? stop(&v, c, &e) : a.watch ? watch(&v, c, &e) : show(&v, a.json);
    if (rc >= 0)
        rc = process_flush_output(&e);
    if (rc < 0)
        fprintf(stderr, "fb-status: %s\n", e.msg);
    control_free(&c);
    view_release(&v);
    rundir_release(&run);
    return rc < 0;
}
