# SPDX-License-Identifier: Apache-2.0
# Compiling GPU kernels: finds nvcc and has it make a cubin of a .cu file for each architecture.
#
#   KVQ_CUDA                  ON (fails without nvcc), OFF, or AUTO (if there is one)
#   KVQ_CUDA_ARCHITECTURES    which; those that this nvcc does not know are left out
#   KVQ_NVCC                  the compiler; looked for in PATH, build/cuda and /usr/local/cuda
#
# No CUDA library is linked: kernels/cuda/driver.c opens the driver at run time.
set(KVQ_CUDA AUTO CACHE STRING "Compile the GPU kernels with nvcc: ON, OFF or AUTO")
set_property(CACHE KVQ_CUDA PROPERTY STRINGS ON OFF AUTO)
set(KVQ_CUDA_ARCHITECTURES 80 90a 100 120 CACHE STRING "Compute capabilities to compile for")

set(kvq_cuda OFF)
if(KVQ_CUDA)
    find_program(KVQ_NVCC nvcc HINTS ${CMAKE_SOURCE_DIR}/build/cuda/nvidia/cu13/bin
                 $ENV{CUDA_HOME}/bin /usr/local/cuda/bin DOC "The CUDA compiler")
    if(KVQ_NVCC)
        set(kvq_cuda ON)
    elseif(KVQ_CUDA STREQUAL "AUTO")
        message(STATUS "GPU kernels are left out: no nvcc found (KVQ_CUDA is AUTO)")
    else()
        message(FATAL_ERROR "KVQ_CUDA is ${KVQ_CUDA}, and no nvcc was found. Run tools/deps.sh "
                "cuda, or give -DKVQ_NVCC=PATH, or build without GPU kernels: -DKVQ_CUDA=OFF")
    endif()
endif()

# Compute capabilities, such as 80 or 90a, that both the list and the compiler have.
set(kvq_cuda_architectures "")
if(kvq_cuda)
    execute_process(COMMAND ${KVQ_NVCC} --version OUTPUT_VARIABLE kvq_nvcc_version)
    string(REGEX MATCH "release [0-9.]+" kvq_nvcc_version "${kvq_nvcc_version}")
    execute_process(COMMAND ${KVQ_NVCC} --list-gpu-code OUTPUT_VARIABLE kvq_nvcc_codes)
    foreach(capability ${KVQ_CUDA_ARCHITECTURES})
        string(REGEX MATCH "^[0-9]+" number ${capability})
        if(kvq_nvcc_codes MATCHES "sm_${number}[^0-9]")
            list(APPEND kvq_cuda_architectures ${capability})
        else()
            message(STATUS "GPU kernels: this nvcc does not know sm_${capability}; left out")
        endif()
    endforeach()
    list(JOIN kvq_cuda_architectures " " text)
    message(STATUS "GPU kernels for compute capabilities ${text} by ${KVQ_NVCC} "
            "(${kvq_nvcc_version})")
endif()

# kvq_cubins(FILE.cu [FLAGS...]): one cubin for each architecture, FILE.sm_NN.cubin in the current
# binary folder. Adds them to the list kvq_gpu_cubins and, in `rows`, to what images.c takes in.
# With kvq_cubin_variant set, that stands behind FILE.
function(kvq_cubins SOURCE)
    get_filename_component(name ${SOURCE} NAME_WE)
    get_filename_component(source ${SOURCE} ABSOLUTE)
    string(APPEND name "${kvq_cubin_variant}")
    foreach(capability ${kvq_cuda_architectures})
        set(cubin ${CMAKE_CURRENT_BINARY_DIR}/${name}.sm_${capability}.cubin)
        add_custom_command(
            OUTPUT ${cubin}
            COMMAND ${KVQ_NVCC} -std=c++17 -O3 -arch=sm_${capability} -cubin -Werror all-warnings
                    -I${CMAKE_SOURCE_DIR} ${ARGN} -MD -MF ${cubin}.d
                    ${source} -o ${cubin}
            DEPENDS ${source} DEPFILE ${cubin}.d
            COMMENT "GPU kernels of ${name} for sm_${capability}" VERBATIM)
        string(REGEX MATCH "^[0-9]+" number ${capability})
        set(only false)
        if(NOT number STREQUAL capability)
            set(only true)
        endif()
        list(APPEND kvq_gpu_cubins ${cubin})
        string(APPEND rows
               " \\\n    X(${name}, sm_${capability}, ${number}, ${only}, \"${cubin}\")")
    endforeach()
    set(kvq_gpu_cubins "${kvq_gpu_cubins}" PARENT_SCOPE)
    set(rows "${rows}" PARENT_SCOPE)
endfunction()
