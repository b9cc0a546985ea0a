# Installs the build into a folder of its own, moves it, and tries the consumer against it. Moving
# shows that the package holds no path of the build.
set(work ${build}/consumer)
file(REMOVE_RECURSE ${work})
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(result)
    message(FATAL_ERROR "${ARGN}: ${result}")
  endif()
endfunction()

step(${CMAKE_COMMAND} --install ${build} --prefix ${work}/first)
file(RENAME ${work}/first ${work}/prefix)
list(PREPEND prefix_path ${work}/prefix)
set(flags "")
if(sanitize)
  set(flags "-fsanitize=${sanitize}")
endif()
step(${CMAKE_COMMAND} -S ${source} -B ${work}/build -G ${generator} "-DCMAKE_PREFIX_PATH=${prefix_path}"
     -DWINNOW_WANTED=${version} -DCMAKE_C_FLAGS=${flags} -DCMAKE_CXX_FLAGS=${flags})
step(${CMAKE_COMMAND} --build ${work}/build)
step(${work}/build/use_cpp)
step(${work}/build/use_c)
