// How Hopper's decode kernel is cut, on any machine: what is chosen, and, where tokens are helped,
// that every position of every list lies in one part, and that mains wait for what helpers store.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "attend/decode_sm90/cut.h"

namespace winnow::internal::attend::decode_sm90 {
namespace {

// Clusters of 1 to 16 CTAs that an H200 runs at once, scaled to other GPUs.
int clusters(int multiprocessors, int size) {
  constexpr int kOfH200[] = {0, 132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7};
  return std::max(1, kOfH200[size] * multiprocessors / 132);
}
Gpu gpu_of(int multiprocessors) { return {multiprocessors, multiprocessors, clusters}; }

Shape shape_of(int tokens, int heads, int width, CacheFormat format = CacheFormat::kV32Fp8) {
  Shape shape;
  shape.formats[0] = shape.formats[1] = format;
  shape.tokens = tokens;
  shape.heads = heads;
  shape.width = width;
  shape.workspace = workspace_bytes(shape);
  return shape;
}
Choice choice_of(const Shape& shape, const Gpu& gpu) {
  return choose(shape, shape.workspace - kExchangeAlign, gpu);
}

// The arguments of a launch, as far as parts.h reads them.
struct Call : HelpedTokens {
  int tokens;
  int groups;
};

// A part that a CTA takes of a token.
struct Taken {
  int cta;
  int number;
  Positions at;
};

// What all CTAs of a launch take, token by token; `lengths` of the tokens' lists.
std::vector<std::vector<Taken>> parts_of_tokens(const Call& call, const std::vector<int>& lengths) {
  std::vector<std::vector<Taken>> of_token(lengths.size());
  for (int n = 0; n < call.main_ctas + call.helpers; n++) {
    const auto cta = [n] { return n; };
    std::set<int> slots;
    const auto take = [&](const Part& part) {
      ASSERT_TRUE(part.token >= 0 && part.token < call.tokens);
      EXPECT_TRUE(slots.insert(part.token % kMostHelperParts).second) << "a slot for two parts";
      of_token[part.token].push_back(
          {n, part_of(call, cta, part.token), positions_of(call, part, cta, lengths[part.token])});
    };
    const Part first = first_part(call, cta);
    if (first.first < first.last) take(first);
    if (n < call.main_ctas) continue;
    for (int token = first.token + 1;; token++) {
      const Part later = later_part(call, cta, token);
      if (later.first == later.last) break;
      take(later);
    }
  }
  return of_token;
}

// Every position once; what a main waits for is what others store; nothing outside the workspace.
void expect_whole(const Call& call, const std::vector<int>& lengths, size_t bytes) {
  const auto of_token = parts_of_tokens(call, lengths);
  std::map<int, int> flags;
  std::map<int, int> halves;
  for (int token = 0; token < call.tokens; token++) {
    std::vector<Taken> parts = of_token[token];
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Taken& a, const Taken& b) { return a.at.begin < b.at.begin; });
    int end = 0;
    std::set<int> stored;
    for (const Taken& part : parts) {
      if (part.at.begin < part.at.end) {
        EXPECT_EQ(part.at.begin, end) << "token " << token;
        end = part.at.end;
      }
      const bool helps = part.cta >= call.main_ctas;
      // As finish_part() does.
      if (helps ? part.at.end == 0 : call.mains == 1) continue;
      EXPECT_TRUE(stored.insert(part.number).second);
      for (int group = 0; group < call.groups; group++) {
        flags[place_of_part(call, part.number, group)]++;
        for (int half = 0; half < (helps ? 2 : 1); half++)
          halves[place_of_half(call, part.number, group, half)]++;
      }
    }
    EXPECT_EQ(end, lengths[token]) << "token " << token;
    for (int main = 0; main < call.mains; main++) {
      const int n = token * call.mains + main;
      OtherParts others(call, token);
      if (left_to_mains(call, lengths[token])) others.leave_out_helpers();
      ASSERT_LT(others.count, kMostTokenParts);
      std::set<int> awaited;
      for (int i = 0; i < others.count; i++)
        EXPECT_TRUE(awaited.insert(others.part(i, [n] { return n; })).second);
      std::set<int> of_others = stored;
      of_others.erase(n);
      EXPECT_EQ(awaited, of_others) << "token " << token << ", main " << main;
    }
  }
  for (const auto& [place, times] : flags)
    EXPECT_TRUE(times == 1 && place >= 0 && place < kMostParts);
  for (const auto& [place, times] : halves)
    EXPECT_TRUE(times == 1 && place >= 0 && helped_bytes(64, place + 1) <= bytes);
}

// Lists of a call: full ones, equal short ones, and any.
std::vector<std::vector<int>> lists_of(const HelpedCut& cut, int tokens, int width,
                                       std::mt19937& random) {
  const int least = 64 * cut.least_helped;
  std::vector<std::vector<int>> lists;
  for (int length : {width, 0, 1, least - 64, least - 63, least, width / 2})
    lists.emplace_back(tokens, std::clamp(length, 0, width));
  std::vector<int>& any = lists.emplace_back(tokens);
  for (int& length : any) length = static_cast<int>(random() % static_cast<unsigned>(width + 1));
  return lists;
}

TEST(DecodeCuts, PartsOfHelpedTokens) {
  std::mt19937 random(1);
  int cuts = 0;
  for (const int multiprocessors : {132, 114, 78, 144})
    for (const int heads : {64, 128, 100, 49})
      for (int tokens = 1; tokens <= multiprocessors; tokens++)
        for (const int width : {1536, 1600, 2000, 2048, 4096, 8192, 16384}) {
          const Shape shape = shape_of(tokens, heads, width);
          const Choice choice = choice_of(shape, gpu_of(multiprocessors));
          if (!choice.is_helped) continue;
          const HelpedCut& cut = choice.helped;
          const Call call{helped_tokens(cut, tokens), tokens, cut.groups};
          EXPECT_GT(call.rest_blocks, 0);
          EXPECT_LE(cut.least_helped, cut.token_blocks) << "no list is helped";
          // All CTAs run at once, and the mains of a token are a cluster.
          EXPECT_LE((call.main_ctas + call.helpers) * cut.groups, multiprocessors);
          EXPECT_EQ((call.main_ctas + call.helpers) % cut.mains, 0);
          for (const std::vector<int>& lengths : lists_of(cut, tokens, width, random))
            expect_whole(call, lengths, shape.workspace - kExchangeAlign);
          if (HasFailure()) FAIL() << tokens << " tokens, " << heads << " heads, width " << width;
          cuts++;
        }
  // 132 multiprocessors alone have more than these.
  EXPECT_GT(cuts, 500);
}

// The launches of a call: its first tokens, and those behind the full waves.
TEST(DecodeCuts, FlagsServeOneLaunch) {
  for (const int multiprocessors : {132, 114, 78, 144})
    for (const int heads : {64, 128})
      for (int tokens = 1; tokens <= 3 * multiprocessors; tokens++) {
        const Gpu gpu = gpu_of(multiprocessors);
        Shape begin = shape_of(tokens, heads, 2048);
        Shape rest = begin;
        begin.tokens = first_launch(begin, false, gpu);
        ASSERT_TRUE(begin.tokens >= 1 && begin.tokens <= tokens);
        rest.tokens = tokens - begin.tokens;
        if (rest.tokens == 0) continue;
        const Choice of_begin = choice_of(begin, gpu);
        const Choice of_rest = choice_of(rest, gpu);
        // Both clear and set the same flags, and splits that meet in the workspace lie over them.
        EXPECT_FALSE(of_begin.is_helped) << tokens;
        EXPECT_FALSE(of_rest.is_helped && of_begin.cut.exchange) << tokens;
      }
}

TEST(DecodeCuts, EveryHeadOnce) {
  const Gpu gpu = gpu_of(132);
  for (const CacheFormat format :
       {CacheFormat::kV32Fp8, CacheFormat::kV32Bf16, CacheFormat::kV4Fp8})
    for (int heads = 1; heads <= 128; heads++)
      for (const int tokens : {1, 2, 7, 24, 36, 64, 100, 133, 512})
        for (const bool fixed : {false, true}) {
          Shape shape = shape_of(tokens, heads, 2048, format);
          shape.fixed_split = fixed;
          const Cut cut = choice_of(shape, gpu).cut;
          EXPECT_GE(cut.groups * cut.heads, heads);
          EXPECT_LT((cut.groups - 1) * cut.heads, heads) << "a group without heads";
          EXPECT_TRUE(cut.splits >= 1 && cut.splits <= 16);
          if (!cut.exchange) continue;
          EXPECT_FALSE(fixed);
          EXPECT_LE(cut.groups * cut.splits * tokens, kMostCtas);
          EXPECT_LE(tokens * cut.groups * exchange_bytes(cut.heads, cut.splits),
                    shape.workspace - kExchangeAlign);
        }
}

// A fixed split depends on the token alone, so its bits do not depend on the batch.
TEST(DecodeCuts, FixedSplitsLeaveBatchesAlone) {
  for (const int heads : {16, 64, 128}) {
    std::set<std::tuple<int, int, int>> cuts;
    for (int tokens = 1; tokens <= 300; tokens++) {
      Shape shape = shape_of(tokens, heads, 2048);
      shape.fixed_split = true;
      const Choice choice = choice_of(shape, gpu_of(132));
      EXPECT_FALSE(choice.is_helped);
      EXPECT_EQ(first_launch(shape, false, gpu_of(132)), tokens);
      cuts.insert({choice.cut.groups, choice.cut.splits, choice.cut.heads});
    }
    EXPECT_EQ(cuts.size(), 1u);
  }
}

// The cases of other tests that are there for helped tokens: attend_suite_test, cuda_delays_test
// and the replays of cuda_test, on an H200. A constant that moves one away from them shows here.
TEST(DecodeCuts, TestsReachHelpedTokens) {
  struct Reached {
    int tokens, heads, width, mains;
  };
  const Reached kReached[] = {{36, 128, 1600, 1}, {38, 128, 1600, 1}, {68, 64, 2048, 1},
                              {40, 128, 2048, 1}, {24, 128, 2048, 2}, {28, 100, 2048, 2},
                              {50, 64, 2048, 2},  {34, 128, 2048, 1}};
  for (const Reached& r : kReached) {
    const Choice choice = choice_of(shape_of(r.tokens, r.heads, r.width), gpu_of(132));
    ASSERT_TRUE(choice.is_helped) << r.tokens << " tokens of " << r.heads << " heads";
    EXPECT_EQ(choice.helped.mains, r.mains) << r.tokens << " tokens of " << r.heads << " heads";
  }
  EXPECT_EQ(first_launch(shape_of(100, 128, 2048), false, gpu_of(132)), 66);
}

// What is chosen for V3.2 with a top-k of 2,048 on an H200. A change of a constant shows here which
// batches it moves; docs/decode-sm90.md describes the forms.
TEST(DecodeCuts, ChoicesOnH200) {
  struct Chosen {
    int heads, tokens;
    // Of the first launch: mains and their blocks where tokens are helped, else splits.
    int mains, main_blocks, splits;
    // Tokens behind the full waves that have a launch of their own.
    int behind;
  };
  const Chosen kChosen[] = {
      {128, 1, 0, 0, 16, 0},  {128, 8, 0, 0, 8, 0},    {128, 22, 0, 0, 3, 0},
      {128, 24, 2, 13, 0, 0}, {128, 28, 2, 15, 0, 0},  {128, 32, 0, 0, 2, 0},
      {128, 36, 1, 20, 0, 0}, {128, 42, 1, 23, 0, 0},  {128, 44, 0, 0, 1, 0},
      {128, 66, 0, 0, 1, 0},  {128, 100, 0, 0, 1, 34}, {64, 46, 2, 13, 0, 0},
      {64, 64, 0, 0, 2, 0},   {64, 68, 1, 19, 0, 0},   {64, 132, 0, 0, 1, 0},
  };
  for (const Chosen& c : kChosen) {
    SCOPED_TRACE(::testing::Message() << c.heads << " heads, " << c.tokens << " tokens");
    Shape shape = shape_of(c.tokens, c.heads, 2048);
    shape.tokens = first_launch(shape, false, gpu_of(132));
    EXPECT_EQ(c.tokens - shape.tokens, c.behind);
    const Choice choice = choice_of(shape, gpu_of(132));
    ASSERT_EQ(choice.is_helped, c.mains > 0);
    if (c.mains > 0) {
      EXPECT_EQ(choice.helped.mains, c.mains);
      EXPECT_EQ(choice.helped.main_blocks, c.main_blocks);
    } else {
      EXPECT_EQ(choice.cut.splits, c.splits);
    }
  }
}

}  // namespace
}  // namespace winnow::internal::attend::decode_sm90
