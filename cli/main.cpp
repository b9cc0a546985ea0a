// winnow: run, layer, soak, verify, bench, support, and a command for each stage.
//
// Exit status: 0 done, 1 a check failed, 2 bad usage or unreadable input.
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include <fmt/format.h>

#include "commands.h"
#include "winnow/support.h"

namespace winnow::cli {
namespace {

// Bad usage or input. Not by fmt::print(), which throws where stderr cannot be written either.
int fail(const std::string& message) {
  std::fprintf(stderr, "winnow: error: %s\n", message.c_str());
  return 2;
}

int run(int argc, char** argv) {
  CLI::App app{"winnow: sparse MLA attention for CPUs and Hopper GPUs"};
  app.set_version_flag("--version", fmt::format("winnow {}", version()));
  app.name("winnow");
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  app.footer(
      "Examples:\n"
      "  winnow run --model v4 --check       a batch of requests through every stage\n"
      "  winnow layer --model v4 --layer c4a one layer of a model, projections included\n"
      "  winnow verify tests/data/golden     this machine's kernels against stored vectors\n"
      "  winnow bench attend --json out.json times, share of the machine's peak, peers\n"
      "  winnow attend --heads 12 --help     one stage alone, and its options\n\n"
      "After an option stands its default, behind = or in parentheses.\n\n"
      "Environment: WINNOW_KERNEL forces a kernel, WINNOW_VERBOSE=1 says why one was chosen,\n"
      "WINNOW_THREADS sets the number of CPU workers.\n\n"
      "Exit status: 0 done, 1 a check failed, 2 bad usage or unreadable input.");
  Outcome outcome;
  add_run(app, outcome);
  add_layer(app, outcome);
  add_soak(app, outcome);
  add_verify(app, outcome);
  add_bench(app, outcome);
  add_support(app, outcome);
  add_layer_verbs(app, outcome);
  add_write(app, outcome);
  add_plan(app, outcome);
  add_score(app, outcome);
  add_select(app, outcome);
  add_locate(app, outcome);
  add_attend(app, outcome);
  add_side_verbs(app, outcome);
  if (argc > 1 && argv[1][0] != '-') {
    std::string known;
    bool found = false;
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
      known += " " + sub->get_name();
      found |= sub->get_name() == argv[1];
    }
    if (!found) return fail(fmt::format("unknown command '{}'; there are:{}", argv[1], known));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    const auto named = app.get_subcommands();
    const std::string command = named.empty() ? "" : " " + named.front()->get_name();
    std::string what = e.what();
    if (dynamic_cast<const CLI::ExtrasError*>(&e)) {  // which names them from the last to the first
      what = "not expected:";
      for (const std::string& word : app.remaining(true)) what += " " + word;
    }
    return fail(fmt::format("{}\nSee winnow{} --help.", what, command));
  }
  return outcome.code;
}

}  // namespace
}  // namespace winnow::cli

int main(int argc, char** argv) {
  try {
    const int code = winnow::cli::run(argc, argv);
    // What was printed counts only if it arrived: a full disk shows when the buffer is written.
    if (!std::cout.flush() || std::fflush(stdout) != 0 || std::ferror(stdout))
      return winnow::cli::fail("the output cannot be written");
    return code;
  } catch (const std::bad_alloc&) {
    return winnow::cli::fail("not enough memory for these sizes");
  } catch (const std::exception& e) {
    return winnow::cli::fail(e.what());
  }
}
