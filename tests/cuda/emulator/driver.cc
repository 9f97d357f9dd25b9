#include "tests/cuda/exchange_driver.cu"
