/* The work between the forwards of a round: likeliest tokens, acceptance, the metadata of rows, the state of request
   slots, and prompt lookup. */

/* The index of the largest of `count` numbers, the first one on ties. As in torch, NaN counts as the largest. */
static int64_t likeliest_of(const float *x, int64_t count) {
    int64_t best = 0, i = LANES;
    ints no_numbers = {};
    if (count >= LANES) {
        vec tops = *(const vec *)x;
        ints at = lanes(), places = at;
        no_numbers = tops != tops;
        for (; i + LANES <= count; i += LANES) {
            const vec part = *(const vec *)(x + i);
            const ints is_more = part > tops;
            at += LANES;
            tops = chosen(is_more, part, tops);
            places = (is_more & at) | (~is_more & places);
            no_numbers |= part != part;
        }
        best = places[0];
        for (int l = 1; l < LANES; l++)
            if (tops[l] > x[best] || (tops[l] == x[best] && places[l] < best)) best = places[l];
    } else {
        i = 1;
    }
    int has_nan = isnan(x[0]);
    for (int l = 0; l < LANES; l++) has_nan |= no_numbers[l];
    for (; i < count; i++) {
        best = x[i] > x[best] ? i : best;
        has_nan |= isnan(x[i]);
    }
    for (i = 0; has_nan && i < count; i++)
        if (isnan(x[i])) return i;
    return best;
}

/* Strict acceptance of logits [requests, num_rows, vocabulary]. It writes the likeliest tokens [requests, num_rows],
   and how many of them are emitted: the drafts before the first wrong one, plus one; 0 if the request is inactive.
   `num_drafts`: how many drafts each request offers; NULL for all. */
void native_strict(int64_t *tokens, int64_t *num_emitted, const float *logits, const int64_t *drafts,
                   int64_t draft_stride, const uint8_t *active, const int64_t *num_drafts, int64_t num_requests,
                   int64_t num_rows, int64_t vocabulary) {
    for (int64_t request = 0; request < num_requests; request++, tokens += num_rows, drafts += draft_stride) {
        for (int64_t row = 0; row < num_rows; row++, logits += vocabulary) tokens[row] = likeliest_of(logits, vocabulary);
        const int64_t offered = num_drafts ? less(num_drafts[request], num_rows - 1) : num_rows - 1;
        int64_t accepted = 0;
        while (accepted < offered && tokens[accepted] == drafts[accepted]) accepted++;
        num_emitted[request] = active[request] ? accepted + 1 : 0;
    }
}

/* The cache slot of a position. The last page is the scratch page. Positions past the other pages, and negative ones,
   have slots in it. */
static int64_t slot_of(const int64_t *pages, int64_t num_pages, int64_t page_size, int64_t position) {
    const int64_t column = position < 0 ? num_pages - 1 : less(position / page_size, num_pages - 1);
    const int64_t offset = position % page_size;
    return pages[column] * page_size + (offset < 0 ? offset + page_size : offset);
}

/* Find a row's rotary position and its cache slot. */
static void place_row(int64_t *position, int64_t *slot, int64_t wanted, const int64_t *pages, int64_t num_pages,
                      int64_t page_size, int64_t num_positions) {
    *position = less(more(wanted, 0), num_positions - 1);
    *slot = slot_of(pages, num_pages, page_size, wanted);
}

/* Write the metadata of rows at `wanted` positions [requests, num_queries]. Each request has `keys` [requests] keys
   up to its last row. */
void native_build(int64_t *positions, int64_t *slots, int64_t *lengths, const int64_t *wanted, const int64_t *keys,
                  const int64_t *pages, int64_t num_requests, int64_t num_queries, int64_t num_pages,
                  int64_t page_size, int64_t num_positions) {
    for (int64_t request = 0; request < num_requests; request++, pages += num_pages) {
        lengths[request] = more(keys[request], 1);
        for (int64_t row = request * num_queries; row < (request + 1) * num_queries; row++)
            place_row(positions + row, slots + row, wanted[row], pages, num_pages, page_size, num_positions);
    }
}

/* Advance the metadata of one row a request by one position. */
void native_advance(int64_t *positions, int64_t *slots, int64_t *lengths, const int64_t *pages, int64_t num_requests,
                    int64_t num_pages, int64_t page_size, int64_t num_positions) {
    for (int64_t request = 0; request < num_requests; request++, pages += num_pages) {
        const int64_t position = lengths[request]++;
        positions[request] = less(position, num_positions - 1);
        slots[request] = slot_of(pages, num_pages, page_size, position);
    }
}

/* Write the metadata of a catch-up step of num_rows rows a request, which begin `first` positions past its committed
   length L, and of the request's live row. This is the row of the last emitted token, or the first row if nothing was
   emitted. `places` takes, one after another: positions and slots [requests, num_rows], lengths [requests]; the same
   three of the live rows; their flat indices [requests]; and the committed lengths after this round [requests], L + 1
   if nothing was emitted. */
void native_catchup(int64_t *places, const int64_t *kv_lens, const int64_t *num_emitted, const int64_t *pages,
                    int64_t first, int64_t num_requests, int64_t num_rows, int64_t num_pages, int64_t page_size,
                    int64_t num_positions) {
    int64_t *positions = places, *slots = positions + num_requests * num_rows;
    int64_t *lengths = slots + num_requests * num_rows, *live_positions = lengths + num_requests;
    int64_t *live_slots = live_positions + num_requests, *live_lengths = live_slots + num_requests;
    int64_t *live_rows = live_lengths + num_requests, *live_lens = live_rows + num_requests;
    for (int64_t i = 0; i < num_requests; i++, pages += num_pages) {
        const int64_t start = kv_lens[i] + first, num_live = more(num_emitted[i], 1);
        for (int64_t row = 0; row < num_rows; row++, positions++, slots++)
            place_row(positions, slots, start + row, pages, num_pages, page_size, num_positions);
        place_row(live_positions + i, live_slots + i, start + num_live - 1, pages, num_pages, page_size, num_positions);
        lengths[i] = more(start + num_rows, 1);
        live_lengths[i] = more(start + num_live, 1);
        live_rows[i] = i * num_rows + num_live - 1;
        live_lens[i] = kv_lens[i] + num_live;
    }
}

/* Update request slots after a round. Their `kv_lens` grow by the number of emitted tokens. Their `input_ids` become
   the last emitted token, then the drafts [requests, width - 1], which lie `request_stride` and `draft_stride` apart.
   `last` [requests] takes that token's index in the round. If nothing was emitted, this is the token at index 0. */
void native_commit(int64_t *kv_lens, int64_t *input_ids, int64_t *last, const int64_t *slot_ids, const int64_t *tokens,
                   const int64_t *num_emitted, const int64_t *drafts, int64_t request_stride, int64_t draft_stride,
                   int64_t num_requests, int64_t num_rows, int64_t width) {
    for (int64_t i = 0; i < num_requests; i++, tokens += num_rows, drafts += request_stride) {
        int64_t *inputs = input_ids + slot_ids[i] * width;
        last[i] = more(num_emitted[i] - 1, 0);
        kv_lens[slot_ids[i]] += num_emitted[i];
        inputs[0] = tokens[last[i]];
        for (int64_t k = 1; k < width; k++) inputs[k] = drafts[(k - 1) * draft_stride];
    }
}

/* Find the longest suffix of a text, of min_ngram to max_ngram tokens, that also occurs earlier in it. Return the index
   after its latest earlier occurrence; -1 if there is none. */
static int64_t latest_match(const int64_t *text, int64_t length, int64_t max_ngram, int64_t min_ngram) {
    int64_t best = -1, longest = min_ngram - 1;
    for (int64_t end = length - 1; end > 0 && longest < max_ngram; end--) {
        const int64_t most = less(end, max_ngram);
        int64_t size = 0;
        while (size < most && text[end - 1 - size] == text[length - 1 - size]) size++;
        if (size > longest) {
            longest = size;
            best = end;
        }
    }
    return best;
}

/* Prompt lookup. Append counts[i] of the tokens [requests, token_stride] to the text of slot_ids[i], from starts[i] on.
   The last column of texts [slots, capacity] is scratch. drafts [requests, num_drafts] take the tokens after the match,
   then 0. */
void native_look_up(int64_t *drafts, int64_t *texts, const int64_t *slot_ids, const int64_t *starts,
                    const int64_t *tokens, const int64_t *counts, int64_t token_stride, int64_t num_requests,
                    int64_t capacity, int64_t max_ngram, int64_t min_ngram, int64_t num_drafts) {
    for (int64_t i = 0; i < num_requests; i++, tokens += token_stride, drafts += num_drafts) {
        int64_t *text = texts + slot_ids[i] * capacity;
        const int64_t length = less(starts[i] + counts[i], capacity);
        for (int64_t j = 0; j < counts[i] && starts[i] + j < capacity - 1; j++) text[starts[i] + j] = tokens[j];
        const int64_t found = latest_match(text, length, max_ngram, min_ngram);
        for (int64_t k = 0; k < num_drafts; k++) drafts[k] = found >= 0 && found + k < length ? text[found + k] : 0;
    }
}
