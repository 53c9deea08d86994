// Work cut into parts, for what is done now and then: threads are made for it and end with it.
#pragma once

#include <system_error>
#include <thread>
#include <vector>

namespace sterna {

// work(part) for every part in 0 .. parts - 1, the calling thread doing the first; returns when all are done. `work` throws nothing.
template <class Work>
void in_parts(int parts, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(size_t(parts));
  for (int part = 1; part < parts; ++part) {
    try {
      others.emplace_back(work, part);
    } catch (const std::system_error&) {  // no more threads may be made
      work(part);
    }
  }
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace sterna
