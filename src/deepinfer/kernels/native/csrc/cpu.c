/* Compiled without any extension, so that it runs on every x86-64: is it safe to call the rest? */

__attribute__((visibility("default"))) int deepinfer_cpu_ok(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
