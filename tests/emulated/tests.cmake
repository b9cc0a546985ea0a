# The tests of the emulated GPU: whole programs, which take hours, and for CI a part of some of them
# (label `brief`).
get_property(emulated_tests DIRECTORY PROPERTY TESTS)
set_tests_properties(${emulated_tests} PROPERTIES TIMEOUT 20000)

# One case in `parts` of a program.
set(brief_programs)
function(winnow_brief name parts)
  add_test(NAME ${name}.brief COMMAND ${name} --gtest_brief=1 ${emulated_filter})
  set_tests_properties(${name}.brief PROPERTIES LABELS brief TIMEOUT 600
                       ENVIRONMENT "GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=0;WINNOW_TEST_DEVICE=cuda")
  set(brief_programs ${brief_programs} ${name} PARENT_SCOPE)
endfunction()
foreach(name ptx_test matrix_test numbers_test memory_test runtime_test locate_test write_test merge_test absorb_test lists_test
             mask_test rotate_test index_query_test prologue_test gather_test)
  winnow_brief(${name} 1)
endforeach()
winnow_brief(norm_test 3)
winnow_brief(norm_write_test 3)
winnow_brief(prepare_queries_test 3)
winnow_brief(score_test 5)
winnow_brief(select_test 12)
winnow_brief(attend_test 25)
winnow_brief(cut_test 10)
winnow_brief(compress_test 20)
winnow_brief(mha_test 10)
add_custom_target(emulated_brief DEPENDS ${brief_programs})
