/* What a caller in C writes, for compilers with many warnings. Compiled, never run. */
#include <winnow/winnow_c.h>

winnow_status strict(const void* q, void* out, const int64_t* shape);

winnow_status strict(const void* q, void* out, const int64_t* shape) {
  winnow_attend_args attend = WINNOW_ATTEND_ARGS_INIT;
  winnow_pipeline_args pipeline = WINNOW_PIPELINE_ARGS_INIT;
  winnow_cut_args cut = WINNOW_CUT_ARGS_INIT;
  winnow_norm_args norm = WINNOW_NORM_ARGS_INIT;
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  winnow_plan* plan = NULL;
  const winnow_status made = winnow_plan_create(&options, &plan);
  if (made != WINNOW_OK) return made;
  attend.plan = plan;
  attend.q = winnow_tensor_of(q, WINNOW_BF16, 3, shape);
  attend.out = winnow_tensor_of(out, WINNOW_BF16, 3, shape);
  attend.scale = 0.1F;
  pipeline.plan = plan;
  (void)winnow_norm(&norm);
  (void)winnow_cut(&cut);
  (void)winnow_pipeline(&pipeline);
  return winnow_attend(&attend);
}
