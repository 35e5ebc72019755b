// A stand-in for oneCCL's libccl.so.2, built by the tests: the functions that ringway calls, with the prototypes
// of the real header, between processes of one machine. It proves the calls, not the library.
//
// The ranks of a communicator share a file. A collective is a sequence of rounds: every rank shows up to SHOWN
// bytes of its buffer, all meet, each takes what it needs from the others, all meet again.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct onecclComm* onecclComm_t;
typedef int onecclResult_t;
typedef int onecclDataType_t;
typedef int onecclRedOp_t;
typedef struct { char data[4096]; } onecclUniqueId;

namespace {

constexpr size_t SHOWN = 1 << 18;
constexpr size_t MAX_RANKS = 16;
constexpr onecclResult_t SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4;

struct Shared {
    std::atomic<uint32_t> arrived, round, leaving;
    uint64_t counts[MAX_RANKS][MAX_RANKS];
    char shown[MAX_RANKS][SHOWN];
};

float from_half(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    float value;
    if (rest >= 0x7c00u) {
        const uint32_t wide = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
        std::memcpy(&value, &wide, 4);
    } else {
        const uint32_t wide = rest << 13;
        std::memcpy(&value, &wide, 4);
        value *= 5.192296858534828e33f;  // 2^112: the difference of the exponents' biases
        if (sign) value = -value;
    }
    return value;
}

uint16_t to_half(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    const uint16_t sign = uint16_t(wide >> 16 & 0x8000u);
    const float size = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00u;
    if (size >= 65520.0f) return sign | 0x7c00u;
    if (size < 6.103515625e-05f) return sign | uint16_t(std::nearbyint(size * 16777216.0f));  // subnormal
    wide &= 0x7fffffffu;
    return sign | uint16_t(((wide + 0xfffu + (wide >> 13 & 1)) >> 13) - (112u << 10));
}

float from_bfloat(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

uint16_t to_bfloat(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    return uint16_t((wide + 0x7fffu + (wide >> 16 & 1)) >> 16);
}

template <class T> T combine(T one, T other, onecclRedOp_t op) {
    switch (op) {
        case 0: return T(one + other);
        case 1: return T(one * other);
        case 2: return std::max(one, other);
        default: return std::min(one, other);
    }
}

template <class T> void fold(char* total, const char* more, size_t count, onecclRedOp_t op) {
    T* to = reinterpret_cast<T*>(total);
    const T* from = reinterpret_cast<const T*>(more);
    for (size_t i = 0; i < count; ++i) to[i] = combine(to[i], from[i], op);
}

template <float (*widen)(uint16_t), uint16_t (*round)(float)>
void fold_wide(char* total, const char* more, size_t count, onecclRedOp_t op) {
    uint16_t* to = reinterpret_cast<uint16_t*>(total);
    const uint16_t* from = reinterpret_cast<const uint16_t*>(more);
    for (size_t i = 0; i < count; ++i) to[i] = round(combine(widen(to[i]), widen(from[i]), op));
}

using Fold = void (*)(char*, const char*, size_t, onecclRedOp_t);

Fold fold_of(onecclDataType_t type, size_t* width) {
    switch (type) {
        case 0: *width = 1; return fold<int8_t>;
        case 1: *width = 1; return fold<uint8_t>;
        case 2: *width = 4; return fold<int32_t>;
        case 4: *width = 8; return fold<int64_t>;
        case 6: *width = 2; return fold_wide<from_half, to_half>;
        case 7: *width = 4; return fold<float>;
        case 8: *width = 8; return fold<double>;
        case 9: *width = 2; return fold_wide<from_bfloat, to_bfloat>;
        default: return nullptr;
    }
}

}  // namespace

struct onecclComm {
    Shared* shared;
    size_t size;
    int rank;
    std::string path;

    void meet() {
        const uint32_t round = shared->round.load(std::memory_order_acquire);
        if (shared->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            shared->arrived.store(0, std::memory_order_relaxed);
            shared->round.store(round + 1, std::memory_order_release);
            return;
        }
        while (shared->round.load(std::memory_order_acquire) == round) usleep(50);
    }

    // Shows `bytes` of `data` round by round; `take(place, length)` sees what all show of [place, place + length).
    void rounds(const void* data, size_t bytes, size_t longest, const std::function<void(size_t, size_t)>& take) {
        for (size_t place = 0; place < longest; place += SHOWN) {
            const size_t length = std::min(SHOWN, longest - place);
            if (place < bytes)
                std::memcpy(shared->shown[rank], static_cast<const char*>(data) + place, std::min(length, bytes - place));
            meet();
            take(place, length);
            meet();
        }
    }
};

extern "C" {

onecclResult_t onecclGetVersion(int *version) {
    *version = 20220200;
    return SUCCESS;
}

onecclResult_t onecclGetUniqueId(onecclUniqueId *uniqueId) {
    std::memset(uniqueId->data, 0, sizeof uniqueId->data);
    std::random_device random;
    std::snprintf(uniqueId->data, sizeof uniqueId->data, "/dev/shm/ccl-stand-in-%d-%08x%08x", getpid(), random(), random());
    return SUCCESS;
}

onecclResult_t onecclCommInitRank(onecclComm_t *comm, size_t nranks, onecclUniqueId commId, int rank) {
    if (nranks > MAX_RANKS || rank < 0 || size_t(rank) >= nranks) return INVALID_ARGUMENT;
    const int fd = open(commId.data, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return SYSTEM_ERROR;
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return SYSTEM_ERROR;
    *comm = new onecclComm{static_cast<Shared*>(memory), nranks, rank, commId.data};
    (*comm)->meet();
    unlink(commId.data);
    return SUCCESS;
}

onecclResult_t onecclCommDestroy(onecclComm_t comm) {
    munmap(comm->shared, sizeof(Shared));
    delete comm;
    return SUCCESS;
}

const char *onecclGetErrorString(onecclResult_t result) {
    return result == INVALID_ARGUMENT ? "Invalid argument" : result == SUCCESS ? "Success" : "Error";
}

const char *onecclGetLastError(onecclComm_t comm) {
    (void)comm;
    return "the stand-in has no more to say";
}

onecclResult_t onecclAllReduce(void *sendbuff, void *recvbuff, size_t count, onecclDataType_t datatype, onecclRedOp_t reduction_op, onecclComm_t comm, void *stream) {
    size_t width = 0;
    const Fold fold = fold_of(datatype, &width);
    if (fold == nullptr || reduction_op > 3 || stream != nullptr) return INVALID_ARGUMENT;
    comm->rounds(sendbuff, count * width, count * width, [&](size_t place, size_t length) {
        char* into = static_cast<char*>(recvbuff) + place;
        std::memcpy(into, comm->shared->shown[0], length);
        for (size_t rank = 1; rank < comm->size; ++rank) fold(into, comm->shared->shown[rank], length / width, reduction_op);
    });
    return SUCCESS;
}

onecclResult_t onecclReduce(const void *sendbuff, void *recvbuff, size_t count, onecclDataType_t datatype, onecclRedOp_t redop, int root, onecclComm_t comm, void *stream) {
    std::string unseen(comm->rank == root ? 0 : count * 8, '\0');
    void* into = comm->rank == root ? recvbuff : unseen.data();
    return onecclAllReduce(const_cast<void*>(sendbuff), into, count, datatype, redop, comm, stream);
}

onecclResult_t onecclBroadcast(const void *sendbuff, void *recvbuff, size_t count, onecclDataType_t datatype, int root, onecclComm_t comm, void *stream) {
    size_t width = 0;
    if (fold_of(datatype, &width) == nullptr || root < 0 || size_t(root) >= comm->size || stream != nullptr) return INVALID_ARGUMENT;
    comm->rounds(sendbuff, count * width, count * width, [&](size_t place, size_t length) {
        std::memcpy(static_cast<char*>(recvbuff) + place, comm->shared->shown[root], length);
    });
    return SUCCESS;
}

onecclResult_t onecclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, onecclDataType_t datatype, onecclRedOp_t redop, onecclComm_t comm, void *stream) {
    size_t width = 0;
    if (fold_of(datatype, &width) == nullptr) return INVALID_ARGUMENT;
    std::string whole(recvcount * width * comm->size, '\0');
    const onecclResult_t result = onecclAllReduce(const_cast<void*>(sendbuff), whole.data(), recvcount * comm->size, datatype, redop, comm, stream);
    std::memcpy(recvbuff, whole.data() + recvcount * width * comm->rank, recvcount * width);
    return result;
}

onecclResult_t onecclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, onecclDataType_t datatype, onecclComm_t comm, void *stream) {
    size_t width = 0;
    if (fold_of(datatype, &width) == nullptr || stream != nullptr) return INVALID_ARGUMENT;
    const size_t bytes = sendcount * width;
    comm->rounds(sendbuff, bytes, bytes, [&](size_t place, size_t length) {
        for (size_t rank = 0; rank < comm->size; ++rank)
            std::memcpy(static_cast<char*>(recvbuff) + rank * bytes + place, comm->shared->shown[rank], length);
    });
    return SUCCESS;
}

onecclResult_t onecclAllToAllV(const void *sendbuff, const size_t *send_counts, void *recvbuff, const size_t *recv_counts, onecclDataType_t datatype, onecclComm_t comm, void *stream) {
    size_t width = 0;
    if (fold_of(datatype, &width) == nullptr || stream != nullptr) return INVALID_ARGUMENT;
    for (size_t rank = 0; rank < comm->size; ++rank) comm->shared->counts[comm->rank][rank] = send_counts[rank] * width;
    comm->meet();
    size_t totals[MAX_RANKS] = {}, before[MAX_RANKS] = {}, longest = 0;
    bool fits = true;
    for (size_t rank = 0; rank < comm->size; ++rank) {
        for (size_t to = 0; to < comm->size; ++to) {
            if (to == size_t(comm->rank)) before[rank] = totals[rank];
            totals[rank] += comm->shared->counts[rank][to];
        }
        longest = std::max(longest, totals[rank]);
        fits = fits && comm->shared->counts[rank][comm->rank] == recv_counts[rank] * width;
    }
    comm->meet();
    if (!fits) return INVALID_ARGUMENT;
    comm->rounds(sendbuff, totals[comm->rank], longest, [&](size_t place, size_t length) {
        size_t target = 0;
        for (size_t rank = 0; rank < comm->size; ++rank) {
            const size_t mine = recv_counts[rank] * width, end = before[rank] + mine;
            const size_t from = std::max(place, before[rank]), to = std::min(place + length, end);
            if (from < to)
                std::memcpy(static_cast<char*>(recvbuff) + target + (from - before[rank]), comm->shared->shown[rank] + (from - place), to - from);
            target += mine;
        }
    });
    return SUCCESS;
}

}  // extern "C"
